"""The wording of the commands' errors that need no model, each pinned here once; other tests check the key noun."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from attent import cli

# A command line, then its exit code and message. M is a folder that is never opened.
MESSAGES = """
$ attent docter
2 unknown command `docter`: did you mean `doctor`?
$ attent qqqq
2 unknown command `qqqq`: known are: average, caption, classify, compare, convert, data, demo, distil, doctor, embed, fill, generate, info, look, models, score, serve, train, transcribe, translate
$ attent --versoin
2 unknown option `--versoin`: did you mean `--version`?
$ attent fill M x --jsno
2 Unknown option: --jsno. Did you mean --json?
$ attent doctor now
2 unexpected argument `now`
$ attent average a b --out .
1 .: exists, and nothing is overwritten; give another --out
$ attent average a --out new --last 0
1 `--last` must be 2 or more, but is 0; raise it
$ attent classify M "A text" --top 0
2 --top must be 1 or more, but is 0
$ attent classify nowhere "A text"
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent convert nowhere new --to hf
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent convert nowhere new --to onnx
2 Invalid value "onnx" for --to. Choose from: "attent", "hf", "ctranslate2"
$ attent data
1 name a corpus: a file, a folder, - for stdin, or one of phrases, dates, multi30k, tatoeba, europarl, news-commentary, books, kde4, bible
$ attent data no-such-file.tsv
1 no-such-file.tsv: there is no such file or folder; check the path
$ attent data no-such-file.tsv --jsno
2 Unknown option: --jsno. Did you mean --json?
$ attent demo --steps 0
1 `--steps` must be 1 or more, but is 0
$ attent embed M "A text"
2 there is no output: name a file with --output vectors.npy, or add --json
$ attent embed M "A text" -o vectors.txt
2 --output must end in .npy, but is vectors.txt
$ attent embed M "A text" -o nowhere/vectors.npy
2 nowhere/vectors.npy: must be in an existing folder, but is not; create the folder first
$ attent embed M "A text" --json --threads 0
2 --threads must be 1 or more, but is 0
$ attent embed nowhere "A text" --json
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent fill M "The [MASK]" --top 0
2 --top must be 1 or more, but is 0
$ attent fill nowhere "The [MASK]"
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent generate M A -l 0
2 `--max-new-tokens` must be 1 or more, but is 0
$ attent generate M A -n 2 --temperature 0
2 `--n` must be 1 for greedy search, since all texts would be equal, but is 2; set a `--temperature` above 0
$ attent generate M A --top-p 2
2 `--top-p` must be greater than 0 and at most 1, but is 2.0
$ attent generate M A --file b
2 give a prompt or a --file of prompts, but not both
$ attent generate M A --threads 0
2 --threads must be 1 or more, but is 0
$ attent generate M A -t 0 --seed 3
2 --seed is for sampling, but --temperature 0 is greedy search; leave one of them out
$ attent generate M A B
2 unexpected argument `B`; put a sentence in quotes
$ attent generate nowhere A
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent info nowhere
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent look M "  "
2 the sentence must not be empty; leave it out for the live page
$ attent look M --mask decoder.blocks.0
2 --mask needs a sentence: attent look MODEL "A man rides a bike."
$ attent look M a --ablate --data x
2 --ablate and --prune run on the pairs of --data: leave the sentence out
$ attent look M --ablate
2 --ablate and --prune need parallel text: add --data valid.tsv
$ attent look M --ablate --data x --json -
2 --ablate and --prune run on the pairs of --data: leave --json out
$ attent look M --ablate --data x --layers 0
2 --ablate and --prune run on the pairs of --data: leave --layers out
$ attent look M a --png a.gif
2 --png must be a file that ends in .png, but is a.gif
$ attent look M a -o nowhere/look.html
2 nowhere/look.html: must be a file in an existing folder, but is not; create the folder first
$ attent look M a -o .
2 .: must be a file in an existing folder, but is not; create the folder first
$ attent look M a -b 0
2 --beam-size must be 1 or more, but is 0
$ attent look M --port 99999
2 --port must be from 0 to 65535, but is 99999
$ attent look M a b
2 unexpected argument `b`; put a sentence in quotes
$ attent look M --kind cross
2 --kind needs a sentence: attent look MODEL "A man rides a bike."
$ attent look M --text-pair b
2 --text-pair needs a sentence: attent look MODEL "A man rides a bike."
$ attent look nowhere a
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent score --data t.tsv
2 there is nothing to score: name a MODEL, or translations with --hypotheses FILE
$ attent score --data t.tsv --force-decode
2 --force-decode needs a model: attent score MODEL --force-decode ...
$ attent score --data t.tsv --alignment gold
2 --alignment needs a model: attent score MODEL --alignment ...
$ attent score M --data t.tsv --hypotheses out.txt
2 with --hypotheses nothing is translated: leave MODEL out, or add --force-decode
$ attent score M --data t.tsv --force-decode --baseline x
2 --force-decode translates nothing: leave --baseline out
$ attent score M --data t.tsv --alignment gold --save x
2 --alignment translates nothing: leave --save out
$ attent score M --data t.tsv --force-decode --ensemble x
2 --ensemble is for translating, and --force-decode translates nothing: leave it out
$ attent score --data t.tsv --hypotheses out.txt --worst -1
2 --worst must be 0 or more, but is -1
$ attent score --data t.tsv --hypotheses out.txt -m blue
2 Invalid value "blue" for -m. Choose from: "bleu", "bleu-lc-tok", "chrf", "chrf++", "ter", "rouge-1", "rouge-2", "rouge-l", "cider", "wer", "cer", "exact". Did you mean "bleu"?
$ attent score --data t.tsv --hypotheses out.txt -m
2 -m must be followed by one or more of bleu, bleu-lc-tok, chrf, chrf++, ter, rouge-1, rouge-2, rouge-l, cider, wer, cer, exact
$ attent score --data t.tsv --hypotheses out.txt --ensemble x
2 --ensemble is for translating, and --hypotheses translates nothing: leave it out
$ attent score --data t.tsv --hypotheses out.txt --save nowhere/x
2 nowhere/x: must be in an existing folder, but is not; make the folder first
$ attent score M --data t.tsv --threads 0
2 --threads must be 1 or more, but is 0
$ attent score M --data t.tsv --batch-tokens 0
2 --batch-tokens must be 1 or more, but is 0
$ attent score M --data t.tsv --beam-size 0
2 `--beam-size` must be 1 or more, but is 0
$ attent score M --data t.tsv --n-best 2
2 Unknown option: --n-best. Did you mean --num-beams?
$ attent serve M --workers 0
2 --workers must be 1 or more, but is 0
$ attent serve M --adapter legal
2 --adapter must be different names with folders, such as legal=runs/legal, but is legal
$ attent serve M --max-characters 0
2 `--max-characters` must be more than 0, but is 0
$ attent serve M --max-queued -1
2 `--max-queued` must be 0 or more, but is -1
$ attent serve M --host 0.0.0.0
2 `--host` 0.0.0.0 accepts requests from other machines, so there must be an API key, but there is none; set one with --api-key, or allow everybody with --allow-public
$ attent translate M -b 0
2 `--beam-size` must be 1 or more, but is 0
$ attent translate M -b 2 --n-best 3
2 `--n-best` must be at most `--beam-size`=2, but is 3; widen the beam
$ attent translate M --alignment soft
2 --alignment soft needs --output-type json: add it, or use --alignment hard
$ attent translate M --alignment hard --n-best 2
2 --alignment is for the best translation only: leave --n-best out, or add --output-type json
$ attent translate M --quality --n-best 2 --output-type json
2 --quality is for the best translation only: leave --n-best out
$ attent translate M --quality
2 --quality needs --output-type json or tsv, and text instead of a document
$ attent translate M --in-place
2 --in-place overwrites FILE: name one
$ attent translate M text.po --in-place -o other.po
2 --in-place overwrites FILE: leave --output out
$ attent translate M --mbr 2 --n-best 3
2 --mbr must be at least --n-best, 3, but is 2
$ attent translate M --threads 0
2 --threads must be 1 or more, but is 0
$ attent translate M nowhere.txt
1 nowhere.txt: must be a text file, but cannot be opened (No such file or directory); check its name, or leave it out to read standard input
$ attent translate nowhere
1 nowhere: must be a model folder, but does not exist; give the folder that holds config.json
$ attent train --train corpus.tsv --out run
2 Unknown option: --train. Did you mean --metric?
"""  # noqa: E501 - as printed
LINES = MESSAGES.strip().splitlines()


@pytest.mark.parametrize(("command", "answer"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_error_is_one_sentence(
    command: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - closed with the process
    arguments = shlex.split(command)[2:]
    code, _, message = answer.partition(" ")
    assert cli.main(arguments) == int(code)
    printed = capsys.readouterr()
    known = arguments[:1] if arguments[0] in cli.COMMANDS else []
    hint = f" (see: {' '.join(['attent', *known, '--help'])})" if code == "2" else ""
    assert printed.err == f"attent: error: {message}{hint}\n"
    assert printed.out == ""
    assert not list(tmp_path.iterdir())
