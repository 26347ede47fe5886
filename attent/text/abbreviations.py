"""Abbreviations and sentence starters of each language, for `sentence_splitter`.

Abbreviations are without their last full stop. Unknown languages use those of all languages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True)
class AbbreviationRules:
    """Rules of one language.

    titles    before a name, in this spelling; never the end of a sentence
    numeric   before a number, otherwise words ("No. 5", "no. Then"); in lower case
    general   the end of a sentence only if a word of `starters` follows; in lower case
    starters  words that are capitalized only at the start of a sentence
    """

    titles: frozenset[str]
    numeric: frozenset[str]
    general: frozenset[str]
    starters: frozenset[str]
    ordinals: bool  # "3." means the third


def _rules(
    titles: str = "", numeric: str = "", general: str = "", starters: str = "", ordinals: bool = False
) -> AbbreviationRules:
    return AbbreviationRules(
        titles=frozenset(titles.split()),
        numeric=frozenset(numeric.split()),
        general=frozenset(general.split()),
        starters=frozenset(starters.split()),
        ordinals=ordinals,
    )


# One month of a language may be another's plain word ("mar", "set"): only what is written with a full stop is here.
LANGUAGES: dict[str, AbbreviationRules] = {
    "en": _rules(
        titles="Mr Mrs Ms Messrs Dr Drs Prof Rev Hon Fr St Sts Mt Gen Col Lt Capt Cpt Maj Sgt Cmdr Gov Sen Rep Pres "
        "Supt Sr Mme Mlle Rt",
        numeric="no nos art arts fig figs p pp vol vols ch sec sect par para eq ref chap ver v op",
        general="vs cf eg ie e.g i.e a.m p.m al approx ca dept est inc ltd co corp jr sr bros viz resp incl excl jan "
        "feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri ave blvd min max tel ext ph.d "
        "b.sc m.sc b.a m.a",
        starters="The This That These Those There Then They Their It Its He She His Her We Our You Your I My In On "
        "At As If But And Or So For From By To With Of When Where While What Which Who Why How However Therefore Thus "
        "Now Also After Before Although Because Since Yet A An All Any Both Each Every Many Most Some Such Let Please "
        "No Not Nor Even Only Here Perhaps Until Under Over Once Is Are Was Were Do Does Did Can Could Will Would "
        "Should",
    ),
    "de": _rules(
        titles="Hr Hrn Fr Frl Mr Mrs Ms Dr Prof Dipl Ing St Sankt Gebr Hl Graf Frhr Mag Rev",
        numeric="nr nrn art abs abl dok bd s kap ziff ziffer abb tab lit anm rn rdnr fn vgl ca tel fig",
        general="bzw ca vgl usw etc evtl ggf inkl exkl zzgl z.b d.h u.a u.u o.ä u.ä i.d.r s.o s.u z.t z.zt v.a o.g "
        "u.s.w i.a a.d b.w m.e n.chr v.chr dgl desgl bspw sog str jh jhd mio mrd tsd max min mind allg ausg bes betr "
        "bzgl einschl entspr geb gest hrsg insb insbes jan feb mär apr jun jul aug sep sept okt nov dez resp rd span "
        "engl frz lat dt österr schweiz verf ehem röm kath ev mfg std co abt kl gr al zb dh ua jr",
        starters="Der Die Das Dem Den Des Ein Eine Einen Einem Einer Eines Ich Du Er Sie Es Wir Ihr Man Und Oder "
        "Aber Denn Doch In Im An Am Auf Aus Bei Beim Mit Nach Von Vom Vor Zu Zum Zur Für Über Unter Um Durch Gegen "
        "Ohne Seit Bis Wenn Als Da Dass Daß Weil Ob Obwohl Wie Was Wer Wo Wann Warum Dies Diese Dieser Dieses Diesen "
        "Diesem Hier Dort Dann Danach Dabei Daher Darum Deshalb Deswegen Damit Dazu Dafür Dagegen Davon Daran Darauf "
        "Dadurch Jetzt Nun So Auch Nicht Nur Noch Schon Sehr Alle Alles Jede Jeder Jedes Kein Keine Mein Meine Sein "
        "Seine Unser Unsere Ihre Ist Sind War Hat Haben Wird Werden Kann Können Soll Sollte Während Trotz Wegen Bitte "
        "Ja Nein Leider Also Allerdings Außerdem Jedoch Sonst Zwar Zudem Ferner Schließlich Insgesamt Natürlich "
        "Vielleicht Heute Morgen Gestern Welche Welcher Welches",
        ordinals=True,
    ),
    "fr": _rules(
        titles="M MM Mme Mmes Mlle Mlles Dr Pr Prof Me Mgr St Ste",
        numeric="art no nos n p pp fig vol chap al ch éd",
        general="etc cf av apr env ex p.ex c.-à-d j.-c janv févr avr juil sept oct nov déc bd tél max min hab ap réf "
        "éd coll cie",
        starters="Le La Les Un Une Des Du De Il Elle Ils Elles On Nous Vous Je Tu Ce Cet Cette Ces C Cela Ceci Et Ou "
        "Mais Or Donc Car Dans En À Au Aux Par Pour Sur Sous Avec Sans Si Quand Lorsque Que Qui Comme Son Sa Ses Leur "
        "Leurs Notre Nos Mon Ma Mes L D J N S Y Pourquoi Comment Après Avant Ainsi Alors Aussi Enfin Puis Toutefois "
        "Cependant",
    ),
    "es": _rules(
        titles="Sr Sra Sres Sras Srta Dr Dra Dres D Dña Prof Lic Ing Ud Uds Vd Vds Sto Sta",
        numeric="art arts núm núms n.º nº pág págs p pp vol fig cap no",
        general="etc ej p.ej p.e aprox ee uu ee.uu av avda tel ene feb abr ago sept oct nov dic a.c d.c a.m p.m máx "
        "mín s.a cía depto dpto fdo",
        starters="El La Los Las Un Una Unos Unas Lo Yo Tú Él Ella Ellos Ellas Nosotros Usted Ustedes Este Esta Estos "
        "Estas Ese Esa Eso Esto Y O Pero En De Del Al A Por Para Con Sin Sobre Si Cuando Que Quien Como Su Sus Mi "
        "Nuestro Nuestra No Es Son También Así Entonces Después Antes Aunque Porque Además",
    ),
    "it": _rules(
        titles="Sig Sigg Dott Dr Prof Avv Ing On Rag Arch Geom Mons",
        numeric="art artt n nn pag pagg p pp vol fig cap",
        general="ecc etc es p.es ca cfr tel gen febb mar apr giu lug ago sett ott nov dic a.c d.c s.p.a max min",
        starters="Il Lo La I Gli Le Un Uno Una L È E Ed O Ma Se In Nel Nella Nei Nelle Di Del Della Dei Da Dal Dalla "
        "A Al Alla Per Con Su Sul Sulla Tra Fra Che Chi Come Quando Dove Questo Questa Questi Queste Quello Quella "
        "Non Ci Si Io Tu Lui Lei Noi Voi Loro Anche Così Poi Dopo Prima Perché Sono",
    ),
    "pt": _rules(
        titles="Sr Sra Srs Sras Dr Dra Drs Prof Profa Eng Exmo Exma D Sto Sta",
        numeric="art arts n.º nº núm pág págs p pp vol fig cap",
        general="etc ex p.ex aprox av tel jan fev abr ago set out nov dez a.c d.c máx mín s.a ltda cia",
        starters="O A Os As Um Uma Uns Umas Eu Tu Ele Ela Eles Elas Nós Vós Este Esta Estes Estas Esse Essa Isso "
        "Isto Aquele E Ou Mas Em No Na Nos Nas De Do Da Dos Das Ao À Por Pelo Pela Para Com Sem Sobre Se Quando Que "
        "Quem Como Seu Sua Não É São Também Assim Então Depois Antes Porque",
    ),
    "nl": _rules(
        titles="Dhr Mevr Mw Dr Drs Prof Ir Ing Mr St Ds",
        numeric="nr nrs art p pp blz fig afb hfst lid",
        general="bijv bv d.w.z enz etc e.d ca o.a m.b.t i.v.m t.a.v t.o.v n.a.v m.a.w a.u.b vgl resp incl excl jan "
        "feb mrt apr jun jul aug sep sept okt nov dec tel max min jl",
        starters="De Het Een Dit Dat Deze Die Ik Jij Je Hij Zij Ze Wij We U Jullie Er En Of Maar Want Dus In Op Aan "
        "Bij Met Van Voor Na Naar Over Onder Uit Tot Door Om Als Wanneer Hoe Wat Wie Waar Waarom Ook Niet Nu Toen "
        "Daar Hier Onze Ons Mijn Zijn Haar Hun Is Zo",
    ),
    "cs": _rules(
        titles="p pí sl Mgr Ing Dr MUDr JUDr PhDr RNDr Prof Doc Bc sv",
        numeric="č čl odst str s obr tab kap sv",
        general="např tj atd apod tzv popř resp mj aj cca mil mld tis hod min max n.l př.n.l tel ul zn vč",
        starters="Ten Ta To Ti Já Ty On Ona Ono My Vy Oni A I Ale Nebo Protože Když Jestliže Pokud V Ve Na Do Od Po "
        "Pro Při S Se Z Ze K Ke O U Za Před Mezi Co Kdo Kde Jak Proč Toto Tato Tento Je Jsou Není Také Tak Proto",
        ordinals=True,
    ),
    "pl": _rules(
        titles="p pp Dr dr Prof prof mgr inż hab św ks gen płk",
        numeric="nr art ust pkt str s rys tab poz dz rozdz",
        general="np tj tzn tzw itd itp m.in ok ul godz mln mld tys zł r w o.o sp por wg ww min max tel",
        starters="To Ten Ta Te Ci Ja Ty On Ona Ono My Wy Oni One I A Ale Lub W We Na Do Od Po Pod Przy Z Ze Za O Dla "
        "Przez Jeśli Jeżeli Gdy Kiedy Co Kto Gdzie Jak Dlaczego Czy Nie Jest Są Tak Także Również Dlatego Jednak",
        ordinals=True,
    ),
    "ru": _rules(
        titles="г-н г-жа проф акад доц им св",
        numeric="ст п пп рис табл стр с гл № т ч",
        general="т.е т.д т.п т.к т.н др пр см напр г гг в вв н.э до.н.э руб коп тыс млн млрд ул д кв корп обл р-н тел "
        "мин макс англ нем лат",
        starters="Это Этот Эта Эти Тот Та То Те Я Ты Он Она Оно Мы Вы Они И А Но Или В Во На До От По Под При С Со "
        "Из За О Об Для Через Если Когда Что Кто Где Как Почему Не Также Так Поэтому Однако У К Ко",
    ),
    "sv": _rules(
        titles="Hr Fr Dr Prof St",
        numeric="nr art kap s sid fig st",
        general="t.ex bl.a m.m d.v.s dvs osv etc ca kl o.s.v s.k p.g.a jan feb mar apr jun jul aug sep sept okt nov "
        "dec max min f.d fr.o.m t.o.m resp jfr",
        starters="Den Det De En Ett Jag Du Han Hon Vi Ni Och Eller Men I På Av Till Från För Med Om När Vad Vem Var "
        "Hur Som Här Där Detta Denna Dessa Inte Nu Så Är Har Vår Min",
    ),
}
LANGUAGES["da"] = LANGUAGES["nb"] = LANGUAGES["no"] = _rules(
    titles="Hr Fr Dr Prof St",
    numeric="nr art stk kap s sid fig pkt",
    general="f.eks bl.a m.m d.v.s dvs osv etc ca kl o.s.v p.g.a m.v mv mht jan feb mar apr jun jul aug sep sept okt "
    "nov dec maks max min fhv ift jf jfr",
    starters="Den Det De En Et Jeg Du Han Hun Vi I Og Eller Men På Af Av Til Fra For Med Om Når Da Hvad Hva Hvem "
    "Hvor Hvordan Som Her Der Dette Denne Disse Ikke Ikkje Nu Nå Så Er Har Vores Vår Min",
    ordinals=True,
)
ORDINAL_LANGUAGES = frozenset("bs et eu fi fo hr hu is lb lv mk nn sk sl sq sr tr".split())


@cache
def get_abbreviations(language: str | None) -> AbbreviationRules:
    """Return the rules of a language ("de", "de-AT"), or the union of all if it is unknown or None."""
    code = (language or "").replace("_", "-").split("-")[0].lower()
    if code in LANGUAGES:
        return LANGUAGES[code]
    names = ("titles", "numeric", "general", "starters")
    union = {name: frozenset().union(*(getattr(words, name) for words in LANGUAGES.values())) for name in names}
    return AbbreviationRules(**union, ordinals=language is None or code in ORDINAL_LANGUAGES)
