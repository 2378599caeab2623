"""The words of everything made up here: answers of the engine, prompts of the demo, merges of the tokenizer.

Every word is one token of the built-in model, alone or after a space, in lower case or capitalised; so text made of
them has about as many tokens as real English has in a large vocabulary. A change here needs a new model directory:
`scripts/make_sim_model.py`.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words(
    """
    account address agent amount analysis answer application approach area argument article aspect balance batch
    block board book bridge budget building business cache capacity case cause center chain chance change channel
    chapter check choice city claim class client cloud cluster code column command company concern condition
    connection contract control copy cost country course customer cycle data date day deadline deal decision
    default degree delay demand design detail device difference direction document domain door driver edge effect
    effort engine error event evidence example exchange factor failure feature field figure file filter fleet
    floor flow force form frame front function future gap garden goal group guide hand harbor head history hour
    house idea image index industry input interest issue item job journey key kind lab language layer leader
    letter level library light limit line list load log loss machine manager map market matter measure member
    memory message method metric minute mission model moment month morning motion name network night node note
    number object office order output owner page paper parent part partner party path pattern payment people
    period person phase picture piece place plan plant point policy pool port power prefix pressure price problem
    process product program project proof property purpose quality question queue range rate reason record region
    release replica report request resource response rest result return risk river road role room round route
    router rule sample scale schedule school science scope screen season second section segment sequence series
    server service session shape share shift signal size slot software solution source space speed stage standard
    state station step storage store stream street structure student study subject summary supplier support
    surface system table target task team term test text theory thing thread ticket time token tool topic traffic
    train trend trial trust unit update user value vendor version view visit voice volume wall warehouse water way
    week weight window winter word work worker world year zone
    """
)

VERBS = _words(
    """
    accept add allow answer apply arrive ask assign avoid begin bring build call carry change check choose close
    collect come compare complete compute consider contain continue cover create cut decide define deliver depend
    describe divide draw drive drop end enter expect explain explore extend fail fall feed fill find finish fit
    follow force give go grow guess handle happen have help hold include increase join keep know lead learn leave
    let limit list look lose make manage mark match mean measure meet move need note offer open order pass pay
    place plan play prepare prevent produce promise protect prove provide publish pull push put raise reach read
    receive record reduce refer remain remember remove repeat replace reply require reset return review run save
    search see select send serve set settle share show sign solve sort speak spend split start stay stop store
    submit support take talk teach tell think touch trace track train travel treat try turn understand use wait
    walk want warn watch win wonder write
    """
)

OTHERS = _words(
    """
    a about above across after again against all almost alone along already also always among an and another any
    are around as at away back be because been before behind below best better between both but by can careful
    cheap clear cold common correct could current deep different direct do does done down during each early easy
    either else empty enough equal even ever every exact fair far fast few final first five for four free fresh
    from full general good great green half hard has he her here high his how however i if important in inside
    into is it its just large last late least less light little local long low main many may me might more most
    much must my near never new next no nor not nothing now of off often old on once one only open or other our
    out over own perhaps plain possible public quick quiet quite rather ready real recent right safe same several
    shall she short should simple since single six slow small so some soon still strong such sure ten than that
    the their them then there these they third this those three through to today together too toward true two
    under until up upon us useful usual very warm was we well were what when where which while who whole why will
    with within without would yes yet you your
    """
)

ROLES = ["assistant", "system", "user", "tool"]

WORDS = sorted({*NOUNS, *VERBS, *OTHERS, *ROLES})
"""All of them, once each."""
