// The sentences of a text and of its translation. The server translates sentence by sentence and keeps the lines.

/** [{source: {text, start}, target: {text, start}}]; a line with another number of sentences is one segment. */
export function pairSegments({ sourceText, text, source, target }) {
  const targetLines = splitLines(text);
  return splitLines(sourceText).flatMap((line, index) => {
    const other = targetLines[index] ?? { text: "", start: text.length };
    const [sources, targets] = [splitSentences(line, source), splitSentences(other, target)];
    if (sources.length !== targets.length) return [{ source: line, target: other }];
    return sources.map((sentence, number) => ({ source: sentence, target: targets[number] }));
  });
}

/** The segment that contains a position of one side ("source" or "target"), or ends before it. */
export const findSegment = (segments, side, position) => segments.findLast((each) => each[side].start <= position) ?? segments[0];

function splitLines(text) {
  let start = 0;
  return text.split("\n").map((line) => {
    start += line.length + 1;
    return { text: line, start: start - line.length - 1 };
  });
}

function splitSentences(line, language) {
  return Array.from(makeSegmenter(language).segment(line.text), ({ segment, index }) => {
    const indent = segment.length - segment.trimStart().length;
    return { text: segment.trim(), start: line.start + index + indent };
  }).filter(({ text }) => text);
}

function makeSegmenter(language) {
  try {
    return new Intl.Segmenter(language, { granularity: "sentence" });
  } catch {
    return new Intl.Segmenter(undefined, { granularity: "sentence" }); // a tag that browsers do not know
  }
}
