"""More hand-written tools, in the format of everyday.py: numbers and formulas, house, health, travel, shop, office, server.
None of them is about a topic that everyday.py keeps out of training. Kinds tod, span, qty and raw are copied as written."""

TOOLS = r"""
#triangle triangle_area,area_of_triangle,calcTriangleArea,geometry.triangle_area
Area of a triangle from its base and how high it is.
@base int:1:90! Length of the base
@h|altitude int:1:90! How high it is over the base
@unit enum:cm|m|inch|feet Unit of length
what's the area of a triangle with base {base} and altitude {h}[ in {unit}]?
how big is a triangle that is {base} wide at the bottom and {h} high?
compute the triangle: base {base}, altitude {h}[, unit {unit}]
a triangle has a base of {base} and an altitude of {h}[, all in {unit}]. what is its area?
find the area of a triangle of base {base} units and altitude {h} units
> area num:1:900

#circle circle_area,area_of_circle,circleArea,geometry.circle
Area and circumference of a circle.
@radius|r num:1:90! Radius
what's the area of a circle with radius {radius}?
how large is a disc of radius {radius}?
circle of radius {radius}, how long is the way around it?
compute area and circumference for r = {radius}
> area num:1:9000; circumference num:1:900

#rectangle rectangle_area,room_area,rectangleArea
Area of a rectangle.
@length num:1:90! Long side
@width num:1:90! Short side
my room is {length} by {width} metres, how many square metres is that?
area of a {length} x {width} rectangle
how much floor do I have with sides {length} and {width}?
compute the surface of a plot of {length} times {width}
> area num:1:9000

#hypot hypotenuse,pythagoras,calc_hypotenuse
Longest side of a right triangle.
@a|side_a int:1:90! One leg
@b|side_b int:1:90! Other leg
the legs are {a} and {b}, how long is the third side?
find the hypotenuse of a right triangle with sides {a} and {b}
pythagoras with {a} and {b}
> c num:1:200

#bmi bmi,body_mass_index,calculate_bmi,calcBmi
Body mass index.
@weight_kg|weight|mass num:40:140! Weight in kilograms
@tall_cm|size int:140:210! How tall, in centimetres
I weigh {weight_kg} kg and I am {tall_cm} cm tall, am I too heavy?
what's the BMI for {weight_kg} kilos at {tall_cm} centimetres?
work out the body mass index: {tall_cm} cm, {weight_kg} kg
is {weight_kg} kg fine for somebody of {tall_cm} cm?
> bmi num:15:40; class pick:normal|low|high

#percent percentage,percent_of,calc_percentage
Percentage of a number.
@value|number|total num:1:9000! Base number
@percent|rate num:1:99! Percent
what is {percent} percent of {value}?
how much is {percent}% of {value}?
take {percent} per cent of {value}
{percent} percent of {value} please
> result num:1:9000

#tip tip_calculator,calc_tip,tipAmount
Work out a tip and split a bill.
@bill|amount|total money! Amount of the bill
@percent|rate int:5:30 Tip in percent
@people|persons int:2:12 Number of people who share
& what should I leave on top of {bill}?
the bill is {bill}[, {percent} percent on top][, we are {people} people]
split {bill} between {people} people[ with {percent}% tip]
we had dinner for {bill}, what does each of us {people} pay?
how much tip is right for {bill}[ at {percent} percent]?
> tip num:1:90; each num:1:300

#prime is_prime,prime_check,checkPrime
Tell whether a number is prime.
@n|number int:2:90000! Number to test
& is {n} prime?
& is {n} a prime number?
& can {n} be divided by anything but itself?
& test whether {n} is prime
? is it a prime number?
> prime pick:true|false

#factor factorize,prime_factors,getFactors
Prime factors of a number.
@n|number int:4:90000! Number
& which primes make up {n}?
& factor {n}
& break {n} down into its prime factors
& what are the factors of {n}?
> factors list:int:2:97

#gcd gcd,greatest_common_divisor,calcGcd
Greatest common divisor of two numbers.
@a|first int:2:900! First number
@b|second int:2:900! Second number
what's the gcd of {a} and {b}?
largest number that divides both {a} and {b}
greatest common divisor for {a} and {b}
which number goes into {a} as well as into {b}?
> gcd int:1:90

#random random_number,rand_int,randomNumber
Draw a random number.
@min|low int:0:12! Lowest value
@max|high int:20:900! Highest value
pick a number between {min} and {max}
give me something random from {min} to {max}
draw a number, at least {min} and at most {max}
I can't decide, choose between {min} and {max}
> number int:1:900

#speed average_speed,calc_speed,speedOf
Average speed from distance and time.
@distance|km num:1:900! Distance in kilometres
@hours|time num:1:20! Time in hours
I drove {distance} km in {hours} hours, how fast was that?
what's the mean speed for {distance} kilometres in {hours} hours?
{hours} hours for {distance} km, compute the speed
> speed num:1:300

#density density,calc_density,materialDensity
Density from mass and volume.
@mass num:1:900! Mass
@volume num:1:90! Volume
@unit enum:kg/m3|g/cm3 Unit of the result
a stone of mass {mass} takes a volume of {volume}, what's its density[ in {unit}]?
how dense is something with {mass} of mass in {volume} of volume?
density for mass {mass} and volume {volume}[, {unit}]
> density num:1:90

#force force,calc_force,newton
Force from mass and acceleration.
@mass|m num:1:900! Mass in kilograms
@acceleration|a num:1:40! Acceleration in m/s^2
what force moves {mass} kg at {acceleration} m/s^2?
a cart of {mass} kilograms accelerates with {acceleration} metres per second squared. how hard is it pushed?
compute F for m = {mass} and a = {acceleration}
> force num:1:9000

#ohm ohms_law,electric_current,calcCurrent
Electric current from voltage and resistance.
@voltage|volts num:1:400! Voltage in volts
@resistance|ohms num:1:900! Resistance in ohms
what current flows at {voltage} volts through {resistance} ohms?
{voltage} V on a {resistance} ohm resistor, how many amps?
a lamp with {resistance} ohms is plugged into {voltage} volts, give me the current
> current num:1:90

#average mean,average,calc_mean,statsMean
Arithmetic mean of numbers.
@numbers|values list:int:1:99! The numbers
what's the average of {numbers}?
mean of {numbers}
what do {numbers} come to on average?
average out {numbers}
> mean num:1:99

#sorting sort_numbers,sort_list,sortValues
Sort a list of numbers.
@numbers|values list:int:1:99! The numbers
@descending bool Largest first
put {numbers} in order[, largest first|descending=true]
sort {numbers}
arrange {numbers} from big to small|descending=true
which order do {numbers} come in?
> done pick:true

#datediff days_between,date_difference,daysUntil
Number of days between two dates.
@first|from date! First day as YYYY-MM-DD
@last|to date! Last day as YYYY-MM-DD
how many days are there from {first} to {last}?
how long is it between {first} and {last}?
days between {first} and {last}
> days int:1:900

#tz convert_time,timezone_convert,timeIn
Convert a time of day from one place to another.
@time|at clock! Time as HH:MM
@from|origin city! Place where it is that time
@to|target city! Place to convert to
when it is {time} in {from}, what time is it in {to}?
convert {time} {from} time to {to} time
I have a call at {time} in {from}, when is that in {to}?
> time clock

#sunrise sunrise,sun_times,sunriseSunset
Times of sunrise and sunset.
@city|place city! Place
@date|day date Day as YYYY-MM-DD
& when does the sun come up in {city}[ on {date}]?
& how long is it light in {city}[ on {date}]?
& when will it get dark in {city}[ on {date}]?
& sunset in {city}[, {date}]
? when does it get dark?
> sunrise clock; sunset clock

#population population,city_population,countPeople
Number of inhabitants of a place.
@place|city city! Place
@year int:1950:2026 Year
& how many people live in {place}[ in {year}]?
& how big is {place}?
& what's the population of {place}[ in {year}]?
& how many inhabitants does {place} have?
> population int:1000:90000

#geocode geocode,coordinates,find_coordinates,getLatLon
Coordinates of a place.
@place|address|query city! Place
& where on the map is {place}?
& what are the coordinates of {place}?
& latitude and longitude of {place}
& give me the position of {place}
> lat num:1:80; lon num:1:170

#tide tide_times,tides,getTides
Tides at a coast.
@harbour|place|port city! Place at the coast
& when is high tide in {harbour}?
& when can I walk on the beach at {harbour}?
& show the tides for {harbour}
& is the sea out in {harbour}?
> high clock; low clock

#pollen pollen_forecast,pollen_count,getPollen
Pollen in the air of a place.
@city|region city! Place
@plant enum:grass|birch|hazel|ragweed Which plant
& will I sneeze in {city}?
& how bad is hay fever in {city}[ for {plant}]?
& pollen count for {city}[, {plant} only]
& is there {plant} in bloom around {city}?
> level pick:low|medium|high

#snow snow_report,ski_conditions,snowDepth
Snow depth at a ski resort.
@resort|place city! Resort
& can I ski in {resort}?
& how deep is the snow in {resort}?
& are the slopes of {resort} open?
& snow report {resort}
? can we go skiing?
> depth_cm int:0:300; open pick:true|false

#visa visa_check,visa_required,checkVisa
Whether a traveller needs a visa.
@nationality|passport lang! Nationality of the passport
@country|destination city! Where the trip goes
does a {nationality} traveller need papers for {country}?
can I enter {country} on a {nationality} passport?
check visa rules: {nationality} passport, going to {country}
> visa pick:true|false

#carrent rent_car,car_rental,rentCar,cars.rent
Rent a car.
@city|pickup|location city! Where to pick it up
@days int:2:30! For how many days
@class|category enum:small|compact|suv|van Kind of car
I need wheels in {city} for {days} days[, a {class}]
get me a car in {city}, {days} days[, {class} class]
hire a vehicle for {days} days in {city}[, {class} please]
we land in {city} and want to drive for {days} days[ in a {class}]
> booking id; price num:20:900

#seat choose_seat,seat_selection,pickSeat
Choose a seat on a flight.
@flight flightno! Flight number
@seat raw! Seat
@meal enum:normal|vegan|halal|kosher Meal on board
put me on {seat} for flight {flight}
I'd like to sit on {seat} in {flight}[ with a {meal} meal]
change my seat on {flight} to {seat}[, {meal} food]
seat {seat}, flight {flight}[, meal {meal}]
> status pick:confirmed|taken

#luggage add_luggage,baggage_add,extraBag
Add a bag to a booking.
@booking|booking_code id! Booking
@weight qty! Weight with its unit
I'm bringing {weight} more on booking {booking}
add a {weight} bag to {booking}
one more suitcase of {weight} for the booking {booking}
> fee num:5:90

#metro metro_route,subway,findMetro
Route by underground.
@from|origin word! First stop
@to|target word! Last stop
which line goes from {from} to {to}?
how do I get from {from} to {to} by underground?
metro from {from} to {to}
take me by subway from {from} to {to}
> line id; minutes int:2:60

#bike rent_bike,unlock_bike,bikeShare
Unlock a shared bike.
@bike|bike_id|code raw! Code on the bike
& unlock {bike}
& I want to ride bike {bike}
& open the lock of {bike}
& begin a trip on {bike}
> trip id

#charge charge_car,ev_charge,startCharging
Charge an electric car.
@post|post_id raw! Charging post
@limit int:50:100 Only up to this percentage
& fill up my car at {post}[ to {limit} percent]
& plug in at {post}[, up to {limit} %]
& begin charging at post {post}
& my battery is low, use post {post}[ up to {limit} percent]
> session id; power int:3:300

#fuel fuel_price,gas_prices,fuelPrices
Price of fuel near a place.
@city|near city! Place
@kind|fuel enum:diesel|petrol|lpg Fuel
& where can I fill up cheaply in {city}[ with {kind}]?
& what does {kind} cost in {city}?
& how expensive is it to refuel around {city}[, {kind}]?
>> station title; price num:1:3

#washing start_laundry,wash_clothes,startWash,laundry.start
Wash laundry.
@program enum:linen|wool|quick|delicate! Program
@temperature int:20:90 Temperature in degrees
@delay span Wait so long before it starts
do the laundry with the {program} program[ at {temperature} degrees]
wash my {program} things[ at {temperature} degrees][, start in {delay}]
run a {program} wash[ at {temperature}][ after {delay}]
my clothes are dirty, {program} please[, {temperature} degrees]
> minutes int:20:180

#grill preheat_grill,grill_on,bakeTemperature
Bring the stove to a temperature for baking.
@temperature|degrees int:80:250! Temperature in degrees
@time|duration int:5:90 Time until it goes off, in min
@mode enum:fan|grill|both Way of heating
I want to bake at {temperature} degrees[ for {time} minutes]
get the stove to {temperature}[ with {mode}]
get it up to {temperature} degrees[, {mode} mode][, off after {time} minutes]
bring it to {temperature} degrees, I have a pie to bake
> status pick:heating|ready

#coffee brew_coffee,make_coffee,coffeeMachine
Make coffee.
@cups|count int:1:8! Number of cups
@strength enum:mild|normal|strong How strong
I need {cups} cups of something hot to wake up[, {strength}]
make {cups} coffees[, {strength} ones]
brew {cups} cups[ of {strength} coffee]
we are tired, {cups} cups please
> status pick:brewing|no beans

#vacuumclean vacuum_room,clean_room,robotClean
Let the robot clean a room.
@room|area room! Room
@times|passes int:2:4 How often
& there is dust in the {room}
& hoover the {room}[ {times} times]
& let the robot go over the {room}[, {times} passes]
& the floor of the {room} is dirty
& clean up the {room}
? let the robot clean
> minutes int:5:60

#blinds set_blinds,move_shutter,blinds.position
Move a window blind.
@room|where room! Room
@position|percent int:0:100! How far it is closed, in percent
close the blinds in the {room} to {position} percent
the sun blinds me in the {room}, {position} percent down please
shutters of the {room} at {position}
move the blind in the {room} to {position} %
> position int:0:100

#alarmhouse arm_alarm,alarm_arm,armSystem
Arm the burglar alarm.
@mode enum:home|away|night! Mode
@code raw Code
& we are leaving, set the alarm to {mode}[ with the code {code}]
& arm the house in {mode} mode[, code {code}]
& switch the burglar alarm to {mode}
& protect the house, mode {mode}[, code {code}]
> armed pick:true

#camera show_camera,camera_view,openCamera
Show the picture of a camera.
@camera|place door! Camera
& who is at the {camera}?
& let me look at the {camera}
& show the camera of the {camera}
& is somebody standing by the {camera}?
> url url

#petfeed feed_pet,dispense_food,petFeeder
Feed a pet by the automatic feeder.
@pet|name person! Name of the animal
@portion|amount qty! How much, with unit
{pet} is hungry, {portion} please
give {pet} {portion} of food
put {portion} into the bowl of {pet}
feed {pet} {portion}
> status pick:done|empty

#medicine log_medicine,take_pill,medicationLog
Note that a medicine was taken.
@drug|medicine pseudo! Medicine
@dose qty! Dose with its unit
@time tod Time of day
I just took {dose} of {drug}
note {dose} {drug}[ at {time}]
I swallowed {dose} of {drug}[ at {time}]
put down that I had {drug}, {dose}[, {time}]
> status pick:noted

#sleep log_sleep,sleep_entry,recordSleep
Record hours of sleep.
@bedtime|from tod! Time of going to bed
@up|to tod! Time of getting up
I slept from {bedtime} to {up}
went to bed at {bedtime} and got up at {up}
record a night from {bedtime} until {up}
> hours num:3:11

#weight log_weight,weight_entry,recordWeight
Record the body weight.
@weight|value qty! Weight with its unit
& the scale says {weight}
& I weigh {weight} today
& put {weight} into my weight diary
& log {weight}
> trend pick:up|down|steady

#meal log_meal,food_diary,addMeal
Record what somebody ate.
@food|dish dish! What was eaten
@amount|portion qty How much
@meal enum:breakfast|lunch|dinner|snack Which meal
I had {food}[ for {meal}]
I ate {amount} of {food}[ for {meal}]
write {food} into the food diary[, {amount}]
for {meal} there was {food}
> calories int:50:1200

#symptom symptom_check,check_symptoms,symptomInfo
What a symptom may mean.
@symptom|complaint phrase! Symptom
@days|since int:2:20 Since how many days
my body tells me: {symptom}[, for {days} days now]
what could it be if I have "{symptom}"[ for {days} days]?
check the symptom "{symptom}"
I feel ill: {symptom}
> advice sentence

#price product_price,price_check,getPrice
Price of an article.
@product|article|item product! Article
@store|shop word Shop
& how much are the {product}[ at {store}]?
& what do {product} cost[ at {store}]?
& are {product} expensive[ at {store}]?
& price of {product}[, {store}]
& can I afford {product}?
> price num:1:90

#stockcheck check_stock,in_stock,inventory_check
Whether an article is in stock.
@sku|article|item raw! Article number
@store|shop city Shop
& do you still have {sku}[ in {store}]?
& is {sku} available[ in {store}]?
& how many {sku} are left[ in {store}]?
& can I get {sku}[ in the {store} shop]?
? is it available?
> count int:0:90

#returns return_item,start_return,returnOrder
Send an article back.
@order|order_id id! Order
@reason enum:damaged|wrong|late|unwanted Reason
& I don't like what came with {order}
& {order} arrived broken|reason=damaged
& send back order {order}[ because it is {reason}]
& you sent me the wrong thing with {order}|reason=wrong
& start a return for {order}[, {reason}]
> label id

#giftcard buy_gift_voucher,voucher_create,giftVoucher
Make a gift voucher.
@amount|value money! Value
@to|recipient person Who gets it
a present worth {amount}[ for {to}]
make a voucher over {amount}[ for {to}]
gift voucher, {amount}[, for {to}]
> code id

#review write_review,add_review,postReview
Write a review of a product.
@product|article product! Product
@stars|rating int:1:5! Stars
@text|comment text Comment
give the {product} {stars} stars[ and say "{text}"]
I liked the {product}, {stars} of 5[: "{text}"]
review: {product}, {stars} stars[, "{text}"]
> status pick:published|checked

#expense add_expense,log_expense,expenseAdd
Record an expense.
@amount money! Amount
@category|for label! What for
@date|day date Day as YYYY-MM-DD
I spent {amount} on {category}[ on {date}]
{amount} went to {category}[ on {date}]
note an expense of {amount} for {category}[, {date}]
put {amount} under {category}
> total num:1:9000

#budgetset set_budget,budget_limit,setBudget
Set a budget for a category.
@category label! Category
@limit|amount money! Limit a month
I don't want to spend more than {limit} on {category}
cap {category} at {limit}
budget for {category}: {limit}
keep {category} below {limit} a month
> status pick:set

#salary net_salary,salary_calculator,netPay
Net salary from the gross salary.
@gross|salary int:1000:90000! Gross salary
@country city Place of work
& what is left of {gross} after tax[ in {country}]?
& I earn {gross}, what do I take home[ in {country}]?
& net pay for {gross}[ in {country}]
> net num:900:9000

#share share_document,share_file,grantAccess
Give somebody access to a document.
@document|file path! Document
@email|with email! Who gets access
@role enum:viewer|editor|owner Role
let {email} see {document}[ as {role}]
give {email} access to {document}[, role {role}]
share {document} with {email}[ as {role}]
{email} should be able to open {document}
> link url

#pdf export_pdf,convert_to_pdf,makePdf
Convert a document to PDF.
@file|document path! Document
@pages|range raw Pages to keep
& make a PDF of {file}[, pages {pages} only]
& I need {file} as a PDF[, just {pages}]
& turn {file} into a portable document
& export {file}[, pages {pages}]
> file path

#print print_document,send_to_printer,printFile
Print a document.
@file|document path! Document
@copies|count int:2:40 Copies
@color|colour bool In colour
& put {file} on paper[, {copies} copies]
& print {file}[ {copies} times][ in colour|color=true]
& I need {copies} paper copies of {file}
& print {file} in black and white|color=false
> job id

#ocr read_image,ocr,extractText
Read the text in a picture.
@image|file path! Picture
@language|tongue lang Language of the text
& what does it say in the picture {image}?
& get the text out of {image}[, it is {language}]
& read what is written on {image}
& write out {image}[ in {language}]
>= sentence

#zip zip_folder,compress_folder,makeArchive
Pack a folder into one file.
@folder|path dir! Folder
@name|output raw Name of the new file
& pack {folder}[ as {name}]
& make one file out of {folder}[ named {name}]
& zip {folder}[ into {name}]
> size int:1:9000

#spell check_spelling,spellcheck,proofread
Find spelling mistakes.
@text text! Text
@language|tongue lang Language
is "{text}" written correctly[ in {language}]?
any typos in "{text}"?
check the spelling of "{text}"[ in {language}]
> mistakes int:0:9

#summary summarize_text,summarize_url,makeSummary
Sum up a page.
@url|page url! Page
@words|length int:20:300 Length in words
& what is {url} about?
& give me the short version of {url}[ in {words} words]
& I have no time to read {url}, sum it up
& boil {url} down[ to {words} words]
>= sentence

#qr make_qr_code,qr_code,generateQr
Make a QR code.
@content|text|data url! What it holds
@size int:100:900 Size in pixels
& I want people to scan {content}
& QR code for {content}[, {size} pixels]
& turn {content} into something that phones can scan[, {size} px]
> file path

#shorten shorten_url,short_link,shortenLink
Make a short link.
@url|link url! Long link
@alias|name raw Wanted name
& {url} is too long, make it short[ as {alias}]
& short link for {url}[ called {alias}]
& shrink {url}[, alias {alias}]
> short url

#poll create_poll,start_vote,newPoll
Start a poll.
@question|title title! Question
@choices|answers list:word! Choices
let people vote on "{question}" with {choices}
ask everybody "{question}": {choices}
poll "{question}", choices {choices}
> poll id

#standup post_standup,daily_update,standupNote
Post a daily status to the team.
@done|yesterday text! What was done
@next|today text What comes next
tell the team that I did this: "{done}"[, and next "{next}"]
my status: "{done}"[, next: "{next}"]
post a standup: "{done}"
> status pick:posted

#assign hand_ticket,ticket_owner,giveTicketTo
Give a ticket to somebody.
@ticket|ticket_id|key raw! Ticket
@person|assignee|user user! Who takes it
{person} should take {ticket}
hand {ticket} to {person}
put {person} on {ticket}
{ticket} goes to {person}
> status pick:assigned

#priority set_priority,ticket_priority,changePriority
Change the priority of a ticket.
@ticket|ticket_id|key raw! Ticket
@priority|level enum:low|normal|high|urgent! Priority
{ticket} is {priority}
make {ticket} {priority}
bump {ticket} to {priority}
set {ticket} to {priority} priority
> status pick:changed

#tagrelease tag_release,create_release,gitTag
Tag a version of a repository.
@repo|repository repo! Repository
@version|tag raw! Version
ship {version} of {repo}
tag {repo} as {version}
cut release {version} from {repo}
mark {repo} with {version}
> commit hex

#build run_build,start_build,triggerBuild,ci.build
Start a build.
@project|repo repo! Project
@branch|ref branch Branch
& compile {project}[ from {branch}]
& start the CI for {project}[ on {branch}]
& build {project}[, branch {branch}]
& does {project} still compile[ on {branch}]?
> build id; status pick:queued|running

#tests run_tests,test_runner,runTests
Run the tests of a project.
@path|target path! What to test
@filter|pattern raw Only tests that match
& do the tests in {path} pass?
& test {path}[, only {filter}]
& run what is in {path}[ matching {filter}]
& check that {path} still works
> passed int:1:400; failed int:0:9

#lint lint_code,check_style,runLinter
Check code style.
@path|file path! File
@fix bool Repair what can be repaired
& is {path} formatted properly?
& lint {path}[ and fix it|fix=true]
& check the style of {path}[ without changing it|fix=false]
& tidy {path} up|fix=true
> warnings int:0:90

#port check_port,port_open,testPort
Whether a port answers.
@host|server host! Host
@port int:1:9000! Port
does {host} listen on {port}?
can I reach {host} at port {port}?
is port {port} of {host} open?
check {host}:{port}
> open pick:true|false

#dns resolve_host,dns_lookup,lookupDns
Look up the address of a host name.
@host|domain|name host! Host name
@record|kind enum:A|AAAA|MX|TXT Record type
& which IP has {host}?
& resolve {host}[ as {record}]
& what does {host} point to[, {record} record]?
& dns of {host}[, {record}]
> address ip

#block block_ip,firewall_block,banIp
Block an address in the firewall.
@ip|address ip! Address
@duration|for span How long
& keep {ip} out[ for {duration}]
& ban {ip}[ for {duration}]
& {ip} attacks us, shut it out[ for {duration}]
& drop traffic from {ip}
> rule id

#cron add_cron,cron_job,repeatCommand
Run a command at fixed times.
@command|cmd cmd! Command
@every|interval span! How often
run `{command}` every {every}
start `{command}` once every {every}
cron `{command}`, interval {every}
repeat `{command}` each {every}
> job id

#kill kill_process,terminate_process,killPid
End a process.
@pid|process int:100:90000! Process number
@force bool Do not wait
& process {pid} hangs, end it[ by force|force=true]
& kill {pid}
& get rid of process {pid}[ gently|force=false]
& terminate pid {pid}
> status pick:ended|not found

#disk disk_usage,check_disk,diskSpace
Free space of a machine.
@host|machine host! Machine
& is {host} running full?
& how much room is left on {host}?
& check the disk of {host}
& can I still store something on {host}?
> free_gb int:1:900

#flag feature_flag,toggle_feature,setFlag
Turn a feature on or off.
@feature|flag raw! Feature
@enabled bool! New state
turn {feature} on for everybody|enabled=true
we ship {feature} now|enabled=true
take {feature} away again|enabled=false
disable {feature}|enabled=false
> status pick:ok

#config set_config,update_setting,configSet
Change a setting.
@key|name raw! Setting
@value raw! New value
set {key} to {value}
change {key} to "{value}"
{key} should be {value}
I want {value} for {key}
> status pick:changed

#namemeaning name_meaning,first_name_info,nameOrigin
Meaning of a first name.
@name person! Name
& what does the name {name} mean?
& where does {name} come from as a name?
& tell me about the name {name}
> meaning word

#synonym find_synonyms,thesaurus,synonyms
Words of the same meaning.
@word|expression word! Word
@count|limit int:2:20 How many
& another word for {word}
& what else can I say for {word}?
& give me {count} words like {word}
& synonyms of {word}[, {count} of them]
> words list:word

#rhyme find_rhymes,rhymes,rhymeWith
Words that rhyme.
@word word! Word
& what rhymes with {word}?
& I write a poem and need a rhyme on {word}
& words that sound like {word}
> words list:word

#trivia trivia_question,quiz,getTrivia
Ask a quiz question.
@topic|category topic! Topic
@level|difficulty enum:easy|medium|hard How hard
& test what I know about {topic}[, {level}]
& quiz me on {topic}
& a {level} question about {topic} please
> question sentence

#horoscope horoscope,star_sign,getHoroscope
Horoscope of the day.
@sign enum:aries|taurus|gemini|leo|virgo|libra! Star sign
& what do the stars say for {sign}?
& I am a {sign}, how will my day be?
& horoscope {sign}
>= sentence

#lyrics song_lyrics,find_lyrics,getLyrics
Words of a song.
@song|title title! Song
@artist|singer person Artist
& how does the text of {song} go[ by {artist}]?
& I want to sing {song}[ by {artist}]
& lyrics of {song}[, {artist}]
>= sentence

#concertfind find_concerts,gigs,searchConcerts
Concerts in a place.
@city|place city! Place
@artist|band person Artist
& who plays live in {city}?
& does {artist} come to {city}?
& gigs in {city}[ by {artist}]
& I want to see a band in {city}
>> artist person; date date

#ticketbuy buy_tickets,order_tickets,purchaseTickets
Buy tickets for an event.
@event|show title! Event
@count|quantity int:1:8! How many
@seat|row raw Seat or row
get me {count} tickets for {event}[, {seat}]
we are {count} and want to see "{event}"[, seat {seat}]
{count} places for {event}[ at {seat}]
buy {count} x "{event}"
> total num:10:400

#tvrecord record_show,set_recording,recordProgram
Record a TV programme.
@show|title title! Programme
@channel id Channel
@time|at tod Time of day
don't let me miss "{show}"[ on {channel}][ at {time}]
tape {show}[ on channel {channel}][ at {time}]
record "{show}"[ at {time}]
> status pick:scheduled

#cast cast_video,play_on_tv,castTo
Show a video on a device.
@video|url url! Video
@device|screen device! Device
put {video} on the {device}
watch {video} in the {device}
throw {video} onto the {device}
> status pick:playing

#focus focus_mode,do_not_disturb,setDnd
Silence all notifications for a while.
@duration|for span! How long
& leave me alone for {duration}
& no calls for {duration}
& I must concentrate for {duration}
& do not disturb, {duration}
> until clock

#stopwatch log_time,track_hours,timeEntry
Record working time.
@project|task label! Project
@time|hours span! How long
I worked {time} on {project}
note {time} on {project}
{project} took me {time}
put {time} of work on {project}
> total num:1:90

#meetmove move_meeting,reschedule_event,eventMove
Move a meeting to another time.
@event|meeting|id raw! Meeting
@time|new_time tod! New time of day
@date|day date_raw New day
push {event} to {time}[ on {date}]
{event} has to be at {time}[ {date}]
can {event} start at {time} instead?
move {event} to {time}[, {date}]
> status pick:moved|conflict

#attendance mark_attendance,check_in,checkIn
Note that somebody is present.
@person|student|name person! Person
@time|at tod Time of day
& {person} is here[ since {time}]
& {person} came in[ at {time}]
& mark {person} as present[, {time}]
> status pick:noted

#grade enter_grade,add_mark,gradeStudent
Enter a mark for a student.
@student|name person! Student
@subject|course word! Subject
@grade|mark raw! Mark
{student} gets {grade} in {subject}
give {student} {grade} for {subject}
mark of {student} in {subject}: {grade}
> average num:1:6

#recycle waste_pickup,trash_day,collectionDay
When waste is collected.
@kind|waste enum:paper|plastic|glass|bio! Kind of waste
@street|address address Address
& when do they take the {kind}[ in {street}]?
& when must the {kind} bin be outside[ at {street}]?
& {kind} collection[, {street}]
> date date

#meter submit_meter,meter_reading,readingSubmit
Report a meter reading.
@meter|meter_id raw! Number of the meter
@reading|value num:1:90000! Reading
meter {meter} stands at {reading}
my counter {meter} shows {reading}
report {reading} for {meter}
> status pick:accepted

#lost report_lost,lost_item,lostAndFound
Report something lost.
@item|object word! What was lost
@where|place place! Where
@date|day date_raw When
I left my {item} at {where}[ {date}]
my {item} is gone, last seen at {where}
lost: {item}, {where}[, {date}]
> report id

#donate donate_money,give_to_charity,donateTo
Give money to an organisation.
@amount money! Amount
@to|charity|organisation word! Organisation
@monthly bool Every month
give {amount} to {to}[ every month|monthly=true]
I want to help {to} with {amount}
donate {amount} to {to}[, just once|monthly=false]
> receipt id
"""
