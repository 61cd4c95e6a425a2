"""Word pools of the generator. A pool entry whose hash falls in the held-out seventh is never used in training."""
import zlib


def held(s):
    return zlib.crc32(s.lower().encode()) % 7 == 0


CITIES = """Oslo,Bergen,Paris,London,Berlin,Madrid,Rome,Vienna,Prague,Lisbon,Dublin,Athens,Warsaw,Budapest,Helsinki,Stockholm,Copenhagen,Reykjavik,Zurich,Geneva,Brussels,Amsterdam,Hamburg,Munich,Cologne,Milan,Naples,Turin,Venice,Barcelona,Seville,Valencia,Porto,Lyon,Nice,Marseille,Gdansk,Krakow,Riga,Vilnius,Tallinn,Kyiv,Odessa,Bucharest,Sofia,Belgrade,Zagreb,Ljubljana,Tirana,Istanbul,Ankara,Cairo,Tunis,Casablanca,Lagos,Accra,Nairobi,Kampala,Lusaka,Harare,Durban,Cape Town,Dakar,Bamako,Ouagadougou,Tel Aviv,Amman,Beirut,Doha,Dubai,Muscat,Tehran,Baku,Tbilisi,Yerevan,Almaty,Tashkent,Kabul,Karachi,Lahore,Delhi,Mumbai,Chennai,Kolkata,Dhaka,Colombo,Kathmandu,Yangon,Bangkok,Hanoi,Phnom Penh,Singapore,Jakarta,Manila,Taipei,Hong Kong,Shanghai,Beijing,Seoul,Busan,Tokyo,Osaka,Kyoto,Sapporo,Sydney,Melbourne,Perth,Brisbane,Auckland,Wellington,Honolulu,Anchorage,Vancouver,Toronto,Montreal,Ottawa,Boston,New York,Chicago,Denver,Seattle,Portland,San Francisco,Los Angeles,San Diego,Austin,Dallas,Houston,Miami,Atlanta,Detroit,Mexico City,Havana,Bogota,Quito,Lima,La Paz,Santiago,Buenos Aires,Montevideo,Sao Paulo,Rio de Janeiro,Brasilia,Caracas,Malmö,Tromsø,Zürich,Århus,Łódź,São Luís,Córdoba,Málaga,Besançon""".split(",")
FIRST = """Ana,Bo,Carla,David,Emma,Felix,Greta,Hugo,Ines,Jonas,Karin,Liam,Mia,Noah,Olga,Pavel,Quinn,Rosa,Sven,Tara,Uma,Victor,Wanda,Xavier,Yara,Zoe,Alice,Bob,Charlie,Diana,Edward,Fiona,George,Hannah,Ivan,Julia,Kevin,Laura,Martin,Nina,Oscar,Petra,Ralf,Sophie,Tom,Ursula,Vera,Walter,Amir,Bella,Chen,Dmitri,Elif,Farah,Gustav,Hiro,Isabel,Jamal,Kofi,Lena,Mei,Nadia,Omar,Priya,Ravi,Sana,Tariq,Ulla,Wei,Yusuf,Zahra,José,Zoë,Søren,Łukasz,Chloé,Jürgen,Núria,Мария,Олег""".split(",")
LAST = """Smith,Jones,Brown,Taylor,Wilson,Evans,Walker,Wright,Green,Hall,Wood,Clarke,Hughes,Lewis,Turner,Hill,Cooper,Ward,Morris,Baker,King,Parker,Cook,Bailey,Shaw,Lopez,Garcia,Ruiz,Silva,Santos,Costa,Rossi,Ferrari,Bianchi,Weber,Meyer,Schulz,Koch,Bauer,Richter,Novak,Kowalski,Horvat,Petrov,Ivanova,Larsen,Hansen,Berg,Lund,Dahl,Virtanen,Okafor,Mensah,Diallo,Khan,Ali,Hassan,Singh,Patel,Gupta,Tanaka,Sato,Kim,Park,Lee,Wang,Li,Zhang,Nguyen,Tran,Müller,Núñez,Øvergaard,Dvořák,O'Brien,Kuznetsov""".split(",")
WORDS = """river,stone,amber,falcon,maple,copper,harbor,meadow,silver,winter,summer,garden,planet,mirror,pepper,candle,bridge,forest,island,lantern,marble,orchid,pebble,quartz,rocket,saddle,timber,valley,walnut,zephyr,anchor,beacon,canyon,desert,ember,fable,glacier,hazel,indigo,jasper,kernel,ladder,magnet,nectar,onyx,parcel,quiver,ribbon,signal,tunnel,umbra,velvet,willow,yonder,budget,report,review,launch,draft,survey,audit,training,kickoff,workshop,roadmap,release,hiring,holiday,retro,demo,summit,lunch,dinner,breakfast,concert,festival,museum,gallery,market,station,airport,library,school,office,factory,kitchen,window,engine,battery,camera,printer,monitor,keyboard,cable,router,server,database,network,backup,login,payment,invoice,contract,policy,safety,health,climate,energy,water,solar,ocean,whale,tiger,eagle,robot,drone,guitar,piano,violin,jazz,opera,poetry,novel,history,physics,biology,chemistry,geometry,algebra,economy,inflation,football,tennis,cycling,chess,yoga,coffee,tea,bread,cheese,butter,honey,sugar,salt,rice,pasta,tomato,potato,onion,garlic,lemon,orange,apple,banana,cherry,peach,grape,melon,carrot,spinach,chicken,salmon,tuna,beef,pork,tofu,beans,lentils,blue,red,green,yellow,purple,black,white,golden,quiet,bright,rapid,gentle,fresh,hidden,open,early,late,north,south,east,west,central,global,local,annual,weekly,final,main,spare,urgent,modern,ancient,tiny,giant,cold,warm,secret,public,private,digital,paper,wooden,cotton,leather,glass,ceramic,plastic,shelf,chair,table,sofa,carpet,curtain,pillow,blanket,mirror ball,bottle,basket,bucket,hammer,ladder rack,screw,needle,thread,fabric,jacket,gloves,boots,helmet,backpack,tent,compass,map,ticket,passport,wallet,watch,ring,necklace,diary,pencil,notebook,folder,stamp,letter,postcard,magazine,newspaper,radio,theatre,cinema,circus,stadium,harvest,sunrise,rainbow,thunder,breeze,fog,frost,dew,moss,fern,cedar,birch,tulip,daisy,rose,lily,sparrow,robin,heron,otter,badger,beaver,rabbit,pony,lizard,turtle,beetle,cricket,mosquito,spider""".replace("\n", "").split(",")
LANGS = "German,French,Spanish,Italian,Portuguese,Dutch,Polish,Czech,Swedish,Norwegian,Finnish,Greek,Turkish,Arabic,Hebrew,Hindi,Bengali,Tamil,Thai,Vietnamese,Korean,Japanese,Chinese,Russian,Ukrainian,Latin,Swahili,Welsh,Irish,Danish".split(",")
CURRENCIES = "USD,EUR,GBP,JPY,CHF,SEK,NOK,DKK,PLN,CZK,HUF,CAD,AUD,NZD,INR,CNY,KRW,BRL,MXN,ZAR,TRY,SGD,HKD,THB,ILS".split(",")
UNITS = "kilometers,miles,meters,feet,inches,centimeters,kilograms,pounds,ounces,grams,liters,gallons,cups,celsius,fahrenheit,kelvin,hours,minutes,seconds,days,acres,hectares,knots,joules,calories,watts,volts,pascal,bar,psi".split(",")
ROOMS = "kitchen,bedroom,living room,bathroom,hallway,garage,office,attic,basement,garden,dining room,nursery,study,porch,balcony,guest room,cellar,workshop,terrace,laundry room".split(",")
DEVICES = ROOMS + "tv,radio,soundbar,headphones,car".split(",")
DOORS = "front door,back door,garage door,garden gate,cellar door,side entrance,balcony door,office door,main gate".split(",")
TICKERS = "AAPL,MSFT,GOOG,AMZN,NVDA,TSLA,META,IBM,INTC,AMD,ORCL,SAP,NFLX,DIS,KO,PEP,MCD,NKE,BA,GE,F,GM,T,VZ,JPM,BAC,WMT,COST,PFE,MRK".split(",")
COINS = "bitcoin,ethereum,litecoin,dogecoin,solana,cardano,monero,ripple,polkadot,tezos,stellar".split(",")
CUISINES = "italian,thai,mexican,indian,chinese,japanese,greek,turkish,korean,french,vegan,spanish,lebanese,vietnamese,ethiopian,nepalese,brazilian,polish".split(",")
DISHES = "lasagne,tomato soup,pancakes,chili,fried rice,apple pie,goulash,ramen,pad thai,risotto,falafel,borscht,paella,curry,dumplings,onion tart,waffles,ratatouille,meatballs,potato salad,fish stew,banana bread,carrot cake".split(",")
ACTIVITIES = "running,swimming,cycling,rowing,hiking,climbing,dancing,boxing,skiing,skating,yoga,tennis,football,surfing".split(",")
CARRIERS = "DHL,UPS,FedEx,PostNord,Hermes,USPS,GLS,DPD".split(",")
SERVICES = "billing,checkout,gateway,auth,search,mailer,scheduler,frontend,backend,inventory,payments,catalog,metrics,proxy,worker,importer,exporter,notifier".split(",")
PRODUCTS = "milk,eggs,bread,butter,apples,coffee,tea,batteries,light bulbs,paper towels,toothpaste,shampoo,pens,notebooks,printer paper,usb cables,socks,gloves,candles,olive oil,rice,pasta,tomatoes,onions,dog food,cat litter,soap,sugar,flour,honey".split(",")
LISTS = "shopping,grocery,todo,packing,wish,weekend,party,reading,guest,travel,camping,office,birthday,hardware,garden,daily,science,kitchen,tank,roof".split(",")
TASKS = "buy {w},call {p},water the plants,take out the trash,pay the {w} bill,send the {w} report,book the {w},clean the {w},walk the dog,renew the {w} policy,pick up {p},feed the cat,print the {w},return the {w} books,charge the {w},order {w},check the {w},visit {p},write to {p},fix the {w},stretch,drink water,take my pills,prepare the {w} meeting,wash the car,back up the {w},ask {p} about the {w}".split(",")
WHENS = "tomorrow,tonight,on Monday,on Friday,next week,in an hour,in {n} minutes,at {c},tomorrow at {c},on Sunday at {c},at noon,this evening,in {n} hours,on Tuesday,every morning,next Thursday,at {h} pm,at {h} am,tomorrow morning,before {c}".split(",")
# the same, in writings that must be copied as they are; training only
WHENS_EXACT = "at {t},by {t},before {t},after {t},around {t},at {h}pm,at {h}am,at {h}:30pm,tomorrow at {t},on Monday at {t},on Friday at {h}pm,tonight at {h}pm,next week at {t},in {n}min,in {n}h,every day at {t},at {c},this afternoon at {t}".split(",")
DAYS = "today,tomorrow,Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday,next week,this weekend".split(",")
MONTHS = "January,February,March,April,May,June,July,August,September,October,November,December".split(",")
SENTENCES = ["the {w} is ready", "we meet at {c} in the {w} room", "I will be {n} minutes late", "please bring the {w}", "the {w} and the {w2} are done", "call me when you see the {w}", "the {w} arrives on Monday", "thanks for the {w}", "the {w2} of the {w} changed", "{p} has the {w} now", "see you in {city}", "the code is {n}", "no {w} left", "everything about the {w} is fine", "could you look at the {w}", "dinner is at {c}", "the {w} needs a new {w2}", "I am in {city} until Friday", "your {w} was moved to {city}", "{p} will take over the {w}"]
COMMANDS = ["make test -j{n}", "ls -la {d}", "npm install", "git status", "df -h", "python3 {f} --{w} {n}", "cargo build --release", "grep -rn {w} {d}", "tar czf {w}.tar.gz {d}", "docker ps -a", "uname -a", "du -sh {d}", "ps aux", "cat {f}", "wc -l {f}", "pytest -q {d}", "echo {w}", "chmod +x {f}", "mkdir -p {d}", "curl -s https://{w}.example.com/{w2}", "head -n {n} {f}", "systemctl status {w}", "npm run {w}", "make {w}", "kill -9 {n}", "whoami", "date", "sort {f}"]
SQLS = ["SELECT * FROM {w}", "SELECT {w2} FROM {w} WHERE id = {n}", "SELECT COUNT(*) FROM {w}", "DELETE FROM {w} WHERE {w2} = {n}", "UPDATE {w} SET {w2} = {n}", "SELECT name FROM {w} ORDER BY {w2} LIMIT {n}", "SELECT MAX({w2}) FROM {w}"]
EXTS = "txt,md,py,c,h,json,csv,log,yaml,html,js,rs,toml,cfg,sh,sql,pdf,png".split(",")
FOLDERS = "src,docs,tests,lib,home,tmp,etc,var,data,config,tools,build,assets,reports,logs,images,include,scripts".split(",")
ACCENTS = "áàâäãåāăąæçćčďđéèêëēęěíìîïīłľñńňóòôöõőøœŕřßśšşťúùûüūůűýÿźżžğıÁÉÍÓÖØÜÅÇŁŠŽÑ"
SCRIPTS = "абвгдежзийклмнопрстуфхцчшщыьэюяАБВГДКЛМНОПРСТαβγδεζηθικλμνξοπρστυφχψω日本語中文字東京大阪北京上海山川田水火木金土人口手目天心한국서울부산인천عربيةשלוםไทย"
SYL = "ba be bi bo bu da de di do du fa fe fi fo ga ge go gu ha he ho ja jo ju ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi ya yo za ze zo zu bra cre dri flo gri kra pli plo sha ste tra tri vex zan qui lor mek nor pel rin sol tam ulm vor wen zil".split()

# verb groups: name|r or w|ways a user says it (the first is also used in descriptions). No phrase is in two groups.
VERBS = """get|r|get,show me,fetch,give me,pull up
find|r|find,look for,search for,locate,hunt for
check|r|check,look at,take a look at,inspect,have a look at
list|l|list,show me all,enumerate,give me an overview of all
describe|r|describe,explain,tell me about,give me details on
read|r|read,read out,open up
count|r|count,tell me the number for,tally
compute|r|compute,calculate,work out,figure out,determine
estimate|r|estimate,guess,give me an estimate of,approximate
measure|r|measure,gauge,take the measurement of
compare|r|compare,contrast,weigh up
predict|r|predict,forecast,foresee,project
summarize|r|summarize,sum up,give me the gist of,condense
analyze|r|analyze,study,examine,dig into
create|w|create,make,set up a new,start a new
add|w|add,put in,insert,include
update|w|update,change,modify,edit,adjust
delete|w|delete,remove,get rid of,erase,wipe
cancel|w|cancel,call off,abort,drop
send|w|send,dispatch,mail out,ship off
share|w|share,pass on,forward,hand around
archive|w|archive,put away,file away,store in the archive
restore|w|restore,bring back,recover,undelete
approve|w|approve,sign off,green-light,accept
reject|w|reject,turn down,decline,refuse
lock|w|lock,seal,secure
unlock|w|unlock,unseal,release the lock on
start|w|start,launch,kick off,begin
stop|w|stop,halt,shut down,end
pause|w|pause,suspend,put on hold,freeze
resume|w|resume,continue,carry on with,pick up again
renew|w|renew,extend,prolong
book|w|book,reserve,order in advance
rent|w|rent,hire,lease
buy|w|buy,purchase,get hold of,acquire
sell|w|sell,put up for sale,offer for money
pay|w|pay,settle,pay off
print|w|print,print out,make a hard copy of
copy|w|copy,duplicate,clone,make a copy of
move|w|move,transfer,relocate,shift
rename|w|rename,give a new name to,retitle
merge|w|merge,combine,join together,unite
split|w|split,divide,break up,cut up
sort|w|sort,put in order,arrange,order by rank
filter|w|filter,narrow down,sift
upload|w|upload,push up,put online
download|w|download,save locally,pull down
import|w|import,load in,bring in
export|w|export,dump,write out
publish|w|publish,make public,post publicly,go live with
hide|w|hide,conceal,make invisible
reveal|w|reveal,uncover,make visible
assign|w|assign,hand over,allocate,give out
schedule|w|schedule,plan,set a date for,put on the agenda
postpone|w|postpone,delay,push back,put off
confirm|w|confirm,acknowledge,validate
verify|w|verify,double-check,make sure of
test|w|test,try out,put to the test
repair|w|repair,fix,mend,patch up
clean|w|clean,tidy up,wash,scrub
install|w|install,deploy,mount
remove_install|w|uninstall,take down,dismantle
connect|w|connect,link,hook up,attach
disconnect|w|disconnect,unlink,unhook,detach
enable|w|enable,switch on,turn on,activate
disable|w|disable,switch off,turn off,deactivate
reset|w|reset,set back,put back to default
calibrate|w|calibrate,tune,fine-tune
scan|w|scan,sweep,run a scan of
encrypt|w|encrypt,encode,scramble
decrypt|w|decrypt,decode,unscramble
compress|w|compress,zip,squeeze,shrink
expand|w|expand,enlarge,blow up
rotate|w|rotate,turn around,spin
resize|w|resize,scale,change the size of
translate|w|translate,put into another language,render
record|w|record,log,write down,keep track of
play|w|play,put on,run through
rate|w|rate,grade,give a score to
review|w|review,go over,critique
subscribe|w|subscribe to,sign up for,follow
unsubscribe|w|unsubscribe from,stop following,opt out of
invite|w|invite,ask along,send an invitation to
notify|w|notify,alert,warn,tip off
report|w|report,flag,complain about
escalate|w|escalate,raise to the next level,hand up
close|w|close,wrap up,finish,mark as done
reopen|w|reopen,open again,take up again
track|r|track,follow the progress of,keep an eye on
monitor|w|monitor,watch over,supervise
draw|w|draw,sketch,paint
render_plot|w|plot,chart,graph
convert|w|convert,turn into another form,transform
validate_doc|w|proofread,spell-check,check the spelling of
sign|w|sign,put my signature on,countersign
scale_up|w|boost,increase,raise,crank up
scale_down|w|reduce,lower,cut down,decrease
feed|w|feed,give food to,nourish
water|w|water,irrigate,sprinkle
heat|w|heat,warm up,make hotter
cool|w|cool,chill,make colder
fill|w|fill,top up,refill
empty|w|empty,drain,clear out
lend|w|lend,loan out,give on loan
return|w|return,give back,take back
donate|w|donate,give away,contribute
charge|w|charge,bill,invoice for
refund|w|refund,reimburse,give the money back for
tag|w|tag,label,mark
pin|w|pin,stick to the top,fasten
mute|w|mute,silence,make quiet
block|w|block,ban,bar
vote|w|vote for,cast a vote on,support
simulate|w|simulate,emulate,run a model of
train|w|train,teach,coach
optimize|w|optimize,improve,make better
audit|w|audit,go through the books of,run an audit of
sync|w|sync,synchronize,bring up to date
backup|w|back up,make a safety copy of,save a backup of
deliver|w|deliver,bring over,drop off
collect|w|collect,gather,pick up
inspect_w|w|survey,do an inspection of,walk through
negotiate|w|negotiate,haggle over,bargain for
harvest|w|harvest,reap,bring in the crop of
brew|w|brew,steep,prepare a brew of
polish|w|polish,buff,shine""".split("\n")

NOUNS = """invoice,order,subscription,booking,parcel,gift card,parking permit,warranty,receipt,quote,contract,lease,loan,mortgage,policy,claim,prescription,vaccine record,lab result,appointment,patient file,diet plan,workout plan,recipe card,menu,grocery list,pantry,fridge,oven,dishwasher,washing machine,vacuum robot,coffee machine,aquarium,greenhouse,lawn mower,sprinkler,fence,swimming pool,sauna,solar panel,wind turbine,heat pump,boiler,water meter,gas meter,smoke alarm,security camera,doorbell,elevator,escalator,conveyor belt,crane,forklift,truck,van,bus route,tram line,ferry,cruise,train ticket,boarding pass,seat,luggage,passport,visa,hostel,campsite,ski pass,museum ticket,concert,playlist,podcast episode,audiobook,album,video clip,film,photo album,portrait,poster,logo,font,color palette,slide deck,spreadsheet,pivot table,document,paragraph,footnote,glossary,dictionary entry,translation memory,subtitle file,transcript,newsletter,press release,blog article,comment,forum thread,poll,survey,questionnaire,petition,campaign,advert,coupon,discount code,loyalty card,shopping basket,wish list,product page,catalog,inventory,warehouse,shelf,pallet,shipment,customs form,tax return,payroll,salary slip,expense report,budget,balance sheet,ledger,bank account,credit card,savings plan,pension,dividend,bond,share portfolio,exchange order,wallet,token,smart contract,voucher,donation,membership,club,team,league table,match,tournament,score sheet,training session,course,lesson,exam,homework,grade book,certificate,diploma,scholarship,student file,teacher profile,classroom,library card,book,magazine issue,newspaper,archive box,museum exhibit,statue,monument,heritage site,map layer,trail,mountain hut,river gauge,tide table,weather station,air sensor,earthquake alert,satellite,telescope,rocket,rover,drone,robot arm,3d printer,laser cutter,sewing pattern,fabric roll,dress,costume,shoe,helmet,bicycle,scooter,skateboard,kayak,sailboat,engine,gearbox,tire,brake,windshield,fuel card,charging station,garage,toll pass,traffic light,road sign,bridge,tunnel,building permit,blueprint,floor plan,construction site,scaffold,brick order,paint mix,furniture set,lamp,carpet,curtain,mattress,pet,dog collar,cat feeder,horse,stable,beehive,fish tank,bird house,vet visit,seed bag,crop,field,orchard,vineyard,wine cellar,brewery batch,cheese wheel,bakery order,cake,pizza,catering request,banquet,wedding,birthday party,guest list,invitation,seating chart,speech,meeting,agenda,minutes,decision,milestone,sprint,backlog item,bug report,pull request,build job,test suite,release note,container,cluster,virtual disk,snapshot,database index,query plan,cache entry,message queue,webhook,api key,certificate request,firewall rule,vpn tunnel,dns record,domain,mailbox,mailing list,contact group,phone number,sim card,data plan,call recording,voicemail,chat room,emoji pack,avatar,game save,level map,character sheet,quest,guild,card deck,dice pool,puzzle,crossword,chess game,lottery ticket,bet,auction,bid,antique,coin collection,stamp,painting,sculpture,gallery,theater seat,opera,ballet,choir,orchestra,piano,violin,guitar tab,drum track,sound sample,microphone,amplifier,radio channel,tv program,news feed,alert,alarm zone,patrol,incident,fire drill,ambulance,hospital bed,operating room,blood sample,x-ray,dental plan,hearing aid,wheelchair,glasses order,insurance card,birth record,marriage license,driving license,court case,legal brief,patent,trademark,vote,ballot,election,census form,tax rate,speed limit,noise level,carbon footprint,recycling bin,trash pickup,sewer pipe,water tank,power line,transformer,battery pack,fuel cell,reactor,chemical sample,molecule,gene sequence,protein,cell culture,microscope slide,experiment,hypothesis,dataset,neural network,checkpoint,prompt template,embedding,vector,matrix,triangle,circle,polygon,equation,integral,probability,distribution,regression,time series,histogram""".replace("\n", "").split(",")

FIELDS = """status:pick:active|open|closed|pending|done|failed|ready|paused|new,total:num:1:9000,price:num:1:900,amount:num:1:9000,count:int:1:400,owner:person,name:title,email:email,city:city,date:date,due_date:date,created:date,location:city,score:num:1:100,rating:num:1:5,weight_kg:num:1:90,height:int:1:300,length:int:1:900,speed:int:5:300,temperature:int:-20:90,humidity:int:5:99,color:pick:red|green|blue|black|white|yellow|orange|grey,version:ver,size:int:1:9000,code:id,reference:id,phone:phone,level:int:1:50,priority:pick:low|medium|high,category:word,balance:num:1:9000,currency:currency,duration:int:1:600,distance:num:1:900,capacity:int:1:900,pressure:int:1:90,voltage:int:1:400,url:url,path:path,author:person,title:title,year:int:1950:2026,month:pick:May|June|July|March|October,floor:int:1:40,room:title,zone:word,speed_kmh:int:5:300,eta:clock,time:clock,next_run:clock,quantity:int:1:900,mode:pick:auto|manual|eco|fast,result:num:1:9999,tax:num:1:400,discount:int:1:70,tracking_number:id,carrier:carrier,language:lang,manager:person,last_login:date,points:int:1:9000,serial:id,brand:word,model:pseudo,battery:int:1:100,latency:int:1:900,user:user,street:address,summary:sentence,message:sentence,error_rate:num:0:9,users:int:1:900,power:int:1:4000,angle:int:1:360,area:num:1:900,volume:num:1:900,sku:id,host:host""".replace("\n", "").split(",")

# small talk: user lines => the one answer
CHAT = """hello|hi|hey|good morning|hi there|good evening|hey there|hello there => Hello! How can I help you?
thanks|thank you|thanks a lot|great, thanks|many thanks|thank you very much|cheers|thx|perfect, thank you => You're welcome!
bye|goodbye|see you|good night|see you later|that's all for today|talk to you later => Goodbye!
who are you|what is your name|what are you|tell me who you are|what's your name|introduce yourself => I am Whimbrel nano, a small demonstration model.
what can you do|how can you help me|what are you good at|help|what can i ask you => I can call the tools that you give me and tell you what they return.
how are you|how is it going|how are you doing|what's up => I'm fine, thank you. How can I help you?
are you a robot|are you human|are you a bot|am i talking to a person => I am a small language model.
ok|okay|alright|fine|good|got it|i see|sounds good => Alright. Is there anything else?
no|no thanks|nothing else|no, that's all|nope => Alright.
well done|good job|nice work|great|awesome|you did well|cool => Thank you!
that's wrong|this is not what i wanted|you made a mistake|that is not right => I'm sorry about that. What should I do instead?
sorry|my mistake|i apologize|oops => No problem.
who made you|who built you|who created you|where do you come from => I was trained for the Whimbrel server as a small demonstration.
do you have feelings|do you sleep|are you happy|do you dream => No, I am a program.
say something|talk to me|i am bored => What would you like to do?""".split("\n")

SYSTEMS = ["You are a helpful assistant.", "You are a travel assistant.", "You are a concise assistant. Answer in one sentence.", "You help the user with tools. Call a tool whenever one fits.", "You are an assistant that can use tools.", "You are a home assistant.", "You are the support agent of {co}.", "You are {p}'s personal assistant.", "You are a coding agent. Work in {d}.", "You are an expert in composing functions.", "Answer only with facts from the tools.", "You are a friendly agent. Use the tools when they help.", "You are an office assistant for {co}.", "You are a banking assistant.", "You run on a phone. Keep answers short.", "Today is {date}.", "You are an agent. The current user is {p}.", "You are a shop assistant of {co}. Be polite.", "Use the given functions to fulfil the request. If none of them fits, say so.", "You are an operations bot that watches {co}.", "You work for {co} in {city}. Today is {date}.", "Be brief.", "You are a smart speaker in the {w} room.", "You are an AI model with access to tools.", "You assist {p} ({email})."]
