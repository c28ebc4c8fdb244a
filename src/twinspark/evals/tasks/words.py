"""Words that the generated cases are drawn from. Data only."""

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa "
    "Sam Tina Umar Vera Will Yara Zoe Adam Bella Carl Dora Eric Fiona George Hanna Ivan Julia Karl "
    "Lena Mark Nina Oscar Petra Ruth Simon Tara Viktor Wendy Amir Bruno Celia Diego Elena Frank "
    "Gina Hugo Irene Jonas Kira Lucas Maya Nora Otto Pia Ralf Sara Tom Ursula Vito Wanda Alma "
    "Boris Cora Dina Emil Flora Gregor Helga Isaac Jana Kurt Lydia"
).split()

CITIES = (
    "Oslo Paris Rome Berlin Madrid Lisbon Vienna Bern Athens Dublin Prague Warsaw Cairo Delhi "
    "Tokyo Seoul Lima Quito Boston Denver Chicago Toronto Sydney Perth Hamburg Munich Milan Turin "
    "Lyon Nice Porto Bergen Malmo Turku Riga Tallinn Vilnius Krakow Zagreb Split Sofia Tunis Accra "
    "Nairobi Lagos Dakar Mumbai Kyoto Osaka Manila Hanoi Bogota Austin Dallas Seattle Montreal"
).split()

COLORS = (
    "red blue green yellow black white brown orange purple pink gray silver golden violet"
).split()

ADJECTIVES = (
    "quiet old bright narrow heavy gentle hidden broken northern southern eastern western frozen "
    "ancient curious distant empty famous grand hollow early late lonely muddy noisy plain proud "
    "rapid round rusty salty sandy shady sharp silent simple slender small smooth stony strong "
    "sunny tall tiny upper lower warm wide wild windy winter summer young clever bold calm cold "
    "copper crystal dusty iron lucky misty polished rough royal secret sleepy steep velvet wooden "
    "deep modern lost open outer inner second third"
).split() + COLORS

PLACES = (
    "harbor tower bridge garden library station market castle island valley river forest mountain "
    "museum school bakery factory lighthouse village cottage palace temple theater hotel cabin "
    "tunnel canal meadow orchard mill farm barn gate square fountain archive cellar attic studio "
    "workshop warehouse observatory laboratory greenhouse stadium kitchen office chapel fortress "
    "lagoon quarry airport depot clinic pavilion"
).split()

THINGS = (
    "apple book lamp chair bottle basket hammer ladder mirror pencil ribbon button candle carpet "
    "coin drum flute guitar hat jacket kettle kite knife map marble needle oven paddle piano "
    "picture pillow plate rope saddle scarf shell shoe spoon stamp stone table teapot ticket towel "
    "trumpet umbrella vase violin wagon watch wheel whistle letter box bag bowl brush camera clock "
    "compass crown desk fan flag glove helmet key lantern magnet"
).split()

ANIMALS = (
    "cat dog horse cow hare goat pig duck crane hen fox moth bear crab rabbit ant otter seal "
    "whale eagle owl raven sparrow swan turtle frog lizard snake bee spider donkey camel lion "
    "tiger monkey beaver badger hedgehog squirrel heron"
).split()

FOODS = (
    "bread cheese soup rice salad honey butter pasta pizza tea coffee milk juice cake pie jam "
    "tomatoes potatoes carrots onions beans peas apples pears plums cherries grapes lemons nuts "
    "eggs fish mushrooms olives pepper garlic spinach"
).split()

HOBBIES = (
    "chess rowing painting reading cooking hiking dancing singing fishing cycling sailing skiing "
    "swimming running gardening knitting sewing pottery yoga tennis football golf climbing "
    "photography astronomy baking camping juggling drumming surfing archery fencing"
).split()

JOBS = (
    "baker teacher nurse doctor pilot farmer painter writer singer carpenter plumber engineer "
    "lawyer judge sailor driver cook gardener tailor librarian chemist architect dentist actor "
    "miner mechanic potter weaver clerk editor"
).split()

MATERIALS = (
    "wood steel glass paper leather cotton wool silk clay stone copper brass plastic rubber marble"
).split()

WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

MONTHS = (
    "January February March April May June July August September October November December"
).split()

VERBS_PAST = (
    "found lost painted repaired sold bought carried cleaned counted described dropped examined "
    "followed ignored liked moved noticed opened remembered sketched studied visited "
    "watched admired borrowed covered"
).split()

ADVERBS = (
    "slowly quickly quietly carefully often rarely suddenly finally gladly calmly twice again "
    "yesterday nearly always sometimes patiently proudly"
).split()

TIMES = (
    "in the morning;in the evening;at noon;after the rain;before sunset;at midnight;last winter;"
    "last spring;during the storm;on the way home;after lunch;before breakfast;late at night;"
    "every summer;for the first time;once a week;a long time ago;that afternoon"
).split(";")

CODE_KINDS = (
    "access code;locker number;ticket number;serial number;pass number;room number;order number;"
    "file number;permit number;secret number;badge number;invoice number;box number;door code;"
    "safe code;alarm code;license number;batch number"
).split(";")

ACTIONS = {
    "create": "create;make;set up;prepare",
    "delete": "delete;remove;get rid of;erase",
    "find": "find;look for;search for;locate",
    "update": "update;change;edit;modify",
    "send": "send;mail out;dispatch;forward",
    "book": "book;reserve",
    "check": "check;inspect;look over;verify",
    "move": "move;relocate;shift",
    "copy": "copy;duplicate",
    "print": "print;print out",
    "archive": "archive;put away in the archive",
    "approve": "approve;accept;agree to",
    "rate": "rate;grade;score",
    "share": "share;pass around",
    "lock": "lock;lock up",
    "order": "order;buy;purchase",
    "schedule": "schedule;plan",
    "measure": "measure;take the measure of",
    "clean": "clean;clean up;tidy up",
    "repair": "repair;fix;mend",
}
"""Verbs of tool names, and how people say them; no two share a word."""

OBJECTS = (
    "ticket invoice report room meeting message file photo parcel account contract letter recipe "
    "playlist song movie lesson course project task note event trip flight hotel table car bike "
    "train package label menu garden lamp door window printer camera sensor robot machine engine "
    "battery server backup folder page article comment question survey form license permit badge "
    "locker shelf box product coupon gift payment loan budget plan map route tent boat"
).split()

TEXT_FIELDS = {
    "city": CITIES, "owner": NAMES, "color": COLORS, "place": PLACES, "weekday": WEEKDAYS,
    "month": MONTHS, "material": MATERIALS, "animal": ANIMALS, "food": FOODS, "hobby": HOBBIES,
    "recipient": NAMES, "destination": CITIES, "job": JOBS, "item": THINGS, "manager": NAMES,
    "origin": CITIES, "guest": NAMES, "topic": HOBBIES, "author": NAMES, "flavor": FOODS,
    "nickname": ADJECTIVES, "symbol": ANIMALS, "building": PLACES, "sender": NAMES,
}  # fmt: skip
"""Fields that hold one word, with the words."""

LIST_FIELDS = {
    "tags": ADJECTIVES, "guests": NAMES, "items": THINGS, "cities": CITIES, "colors": COLORS,
    "animals": ANIMALS, "foods": FOODS, "hobbies": HOBBIES, "members": NAMES, "stops": CITIES,
    "materials": MATERIALS, "labels": THINGS, "keywords": PLACES, "readers": NAMES,
}  # fmt: skip
"""Fields that hold several words, with the words."""

INTEGER_FIELDS = (
    "count year quantity age floor page minute hour seat copy day rank level score size length "
    "width point wheel room volume stock capacity mass row column"
).split()

NUMBER_FIELDS = (
    "price weight height distance speed rating temperature ratio fee depth area discount balance"
).split()

FLAG_FIELDS = (
    "urgent active public private visible paid fragile broken optional verified recurring shared "
    "electric heated portable available confidential reserved waterproof seasonal"
).split()

CHOICE_FIELDS = {
    "priority": "low normal high critical",
    "status": "open waiting closed rejected",
    "shape": "round square oval flat",
    "season": "spring summer autumn winter",
    "direction": "north south east west",
    "format": "text table picture sound",
    "stage": "draft review final",
    "class": "first second third",
    "pace": "slow medium fast turbo",
    "unit": "meters feet miles inches",
    "finish": "matte glossy rough polished",
    "language": "English French German Spanish",
    "access": "read write admin guest",
    "taste": "sweet sour salty bitter",
    "frequency": "daily weekly monthly yearly",
    "side": "left right front back",
}
"""Fields with a few fixed values."""

MADE_UP = (
    "ba be bi bo bu da de di do du fa fe fi fo ga go ha he ka ke ki ko la le li lo lu ma me mi mo "
    "na ne ni no nu pa pe po ra re ri ro ru sa se si so ta te ti to tu va ve vi vo za zo"
).split()
"""Syllables of words that mean nothing."""
