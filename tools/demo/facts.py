"""Small facts the generated dialogues are made of. Written for this project; data only.

Read next: `dialogues.py`, which turns them into chats.
"""

CAPITALS = dict(
    line.split(":")
    for line in (
        "France:Paris;Germany:Berlin;Italy:Rome;Spain:Madrid;Portugal:Lisbon;Austria:Vienna;"
        "Switzerland:Bern;Belgium:Brussels;the Netherlands:Amsterdam;Denmark:Copenhagen;"
        "Sweden:Stockholm;Norway:Oslo;Finland:Helsinki;Poland:Warsaw;Greece:Athens;"
        "Hungary:Budapest;Ireland:Dublin;Iceland:Reykjavik;Russia:Moscow;Ukraine:Kyiv;"
        "Turkey:Ankara;Egypt:Cairo;Morocco:Rabat;Kenya:Nairobi;Nigeria:Abuja;Ghana:Accra;"
        "Ethiopia:Addis Ababa;India:New Delhi;China:Beijing;Japan:Tokyo;South Korea:Seoul;"
        "Thailand:Bangkok;Vietnam:Hanoi;Indonesia:Jakarta;the Philippines:Manila;"
        "Australia:Canberra;New Zealand:Wellington;Canada:Ottawa;the United States:Washington;"
        "Mexico:Mexico City;Cuba:Havana;Brazil:Brasilia;Argentina:Buenos Aires;Chile:Santiago;"
        "Peru:Lima;Colombia:Bogota;Venezuela:Caracas;Uruguay:Montevideo;Iran:Tehran;"
        "Iraq:Baghdad;Israel:Jerusalem;Saudi Arabia:Riyadh;Pakistan:Islamabad;Nepal:Kathmandu;"
        "Croatia:Zagreb;Serbia:Belgrade;Romania:Bucharest;Bulgaria:Sofia;Estonia:Tallinn;"
        "Latvia:Riga;Lithuania:Vilnius;Slovakia:Bratislava;Slovenia:Ljubljana"
    ).split(";")
)

OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "hot:cold;big:small;up:down;left:right;day:night;fast:slow;old:young;open:closed;"
        "light:dark;happy:sad;early:late;full:empty;hard:soft;high:low;in:out;long:short;"
        "loud:quiet;near:far;rich:poor;strong:weak;true:false;wet:dry;wide:narrow;clean:dirty;"
        "begin:end;buy:sell;front:back;first:last;heavy:light;thick:thin;win:lose;give:take;"
        "push:pull;rise:fall;love:hate;same:different;always:never;alive:dead;brave:afraid"
    ).split(";")
)

DEFINITIONS = dict(
    line.split(":", 1)
    for line in (
        "a river:a large stream of water that flows across the land to a lake or to the sea",
        "a mountain:a part of the land that rises high above everything around it",
        "an island:a piece of land with water on every side",
        "a desert:a dry place where very little rain falls and few plants grow",
        "a forest:a large area of land covered with trees",
        "a volcano:a mountain with an opening through which hot rock and gas can escape",
        "a planet:a large round body that moves around a star",
        "a star:a huge ball of hot gas that makes its own light",
        "the moon:the round body that moves around the Earth about once a month",
        "the sun:the star at the centre of our solar system",
        "gravity:the force that pulls things toward each other and keeps us on the ground",
        "rain:water that falls from the clouds in drops",
        "snow:frozen water that falls from the clouds in soft white flakes",
        "ice:water that is so cold that it has become solid",
        "steam:water that has become a gas because it is hot",
        "a cloud:a mass of very small drops of water that floats in the sky",
        "wind:air that moves over the land or the sea",
        "a seed:the small part of a plant from which a new plant can grow",
        "a root:the part of a plant that grows under the ground and takes in water",
        "a leaf:the flat green part of a plant that makes food from light",
        "a bird:an animal with feathers and two wings",
        "a fish:an animal that lives in water and breathes through gills",
        "a mammal:a warm animal that feeds its young with milk",
        "an insect:a small animal with six legs",
        "a computer:a machine that follows a list of instructions to work with data",
        "a program:a list of instructions that a computer can follow",
        "a function:a named piece of a program that takes arguments and returns a result",
        "a variable:a name that refers to a value in a program",
        "a list:an ordered collection of values that can grow and shrink",
        "a dictionary:a collection that maps each key to a value",
        "a string:a sequence of characters",
        "an integer:a whole number, such as 3, 0 or -7",
        "a loop:a part of a program that is repeated",
        "recursion:the way in which a function solves a problem by calling itself",
        "a bug:a mistake in a program",
        "a file:a named collection of data that is stored on a disk",
        "a token:a small piece of text, the unit in which a language model reads and writes",
        "a language model:a program that predicts which token comes next in a text",
        "a neural network:a program made of many simple units whose weights are learned",
        "a prime number:a whole number greater than 1 that only 1 and itself divide",
        "an even number:a whole number that 2 divides without a remainder",
        "an odd number:a whole number that 2 does not divide",
        "a triangle:a shape with three sides and three corners",
        "a square:a shape with four equal sides and four right angles",
        "a circle:a round shape whose points all have the same distance to the centre",
        "a library:a place where books are kept for people to read",
        "a school:a place where people learn",
        "a bridge:a structure that carries a road over a river or a valley",
        "a clock:a machine that shows the time",
        "a map:a drawing of the land that helps you to find your way",
        "a poem:a short text that is written with care for sound and rhythm",
        "music:sounds that are put together so that people enjoy hearing them",
        "a doctor:a person who helps people who are ill",
        "a teacher:a person who helps other people to learn",
        "a friend:a person whom you know well and like",
        "bread:food that is made from flour and water and baked in an oven",
        "milk:the white drink that mammals make for their young",
        "a democracy:a form of government in which the people choose their leaders",
        "a king:a man who rules a country because he was born to do so",
        "a ship:a large boat that carries people or goods across the sea",
    )
)

LISTS = {
    "fruits": "apple banana cherry grape lemon mango orange peach pear plum",
    "colors": "red blue green yellow orange purple white black brown pink",
    "animals": "dog cat horse cow sheep lion tiger elephant rabbit mouse",
    "birds": "eagle owl robin sparrow crow swan duck goose parrot hawk",
    "vegetables": "carrot potato onion cabbage bean pea tomato spinach lettuce leek",
    "tools": "hammer saw drill wrench pliers chisel screwdriver axe shovel rake",
    "instruments": "piano violin guitar flute drum trumpet cello harp organ oboe",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "metals": "iron copper gold silver tin lead zinc nickel aluminium platinum",
    "programming languages": "Python C Java Rust Go Ruby Perl Lisp Haskell JavaScript",
}

SEQUENCES = {
    "days of the week": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "months of the year": "January February March April May June July August September "
    "October November December",
    "seasons": "spring summer autumn winter",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
}

FRENCH = dict(
    pair.split(":")
    for pair in (
        "water:eau;bread:pain;house:maison;dog:chien;cat:chat;book:livre;sun:soleil;moon:lune;"
        "day:jour;night:nuit;friend:ami;tree:arbre;red:rouge;blue:bleu;green:vert;black:noir;"
        "white:blanc;one:un;two:deux;three:trois;hello:bonjour;thank you:merci;yes:oui;no:non"
    ).split(";")
)

ANIMALS = {
    "dog": ("barks", "four", "bones"),
    "cat": ("meows", "four", "fish"),
    "cow": ("moos", "four", "grass"),
    "duck": ("quacks", "two", "seeds"),
    "sheep": ("bleats", "four", "grass"),
    "horse": ("neighs", "four", "hay"),
    "lion": ("roars", "four", "meat"),
    "owl": ("hoots", "two", "mice"),
    "rooster": ("crows", "two", "corn"),
    "bee": ("buzzes", "six", "nectar"),
}

NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul".split()
PLACES = "forest|village|river|mountain|garden|harbour|castle|market|valley|lighthouse".split("|")
THINGS = "golden key|old map|small boat|red lantern|silver coin|blue stone|wooden box".split("|")
ORDINALS = "first second third fourth fifth sixth seventh".split()
JOBS = (
    "baker|fisher|teacher|farmer|painter|miller|gardener|sailor|shepherd|tailor|doctor|carpenter|"
    "clock maker|postman|singer|guard"
).split("|")
GOALS = (
    "find the way home|cross the river|help the neighbors|open the old gate|save the harvest|"
    "bring it back|warn the town|wait for the morning|build a boat|climb the hill"
).split("|")
