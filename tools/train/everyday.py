"""Hand-written everyday tools, as data.

    #GROUP names            two tools of one group never meet in a prompt; a leading ~ keeps the tool out of training
    description
    @name|alias kind[!] text      a parameter, ! = required; the first required one is the primary
    utterance               {p} a value, [..{p}..] optional part, [..|p=v] a part that sets p to v
    & utterance             the primary may be a list of values: one call for each
    ? utterance             the primary is missing: the assistant asks for it
    > field kind; ...       result object    >> rows of it    >= a text result

An utterance in lower case at its start may follow "can you", "please" and the like.
"""

TOOLS = r"""
#weather get_weather,current_weather,weather_now,fetchWeather,weather.current
Get the current weather for a city.
@city|location|place city! The city name
@unit enum:celsius|fahrenheit Temperature unit
& what's the weather in {city}[ in {unit}]?
& What's the weather like in {city} right now?
& how is the weather in {city}?
& check the weather for {city}[, {unit}]
& Is it raining in {city}?
& Do I need an umbrella in {city}?
& Should I take a jacket in {city}[? use {unit}]
& How cold is it in {city}[ in {unit}]?
& get me the weather report for {city}
& Weather {city}
& tell me the temperature in {city}[ in {unit}]
& I'm heading to {city}, what's it like outside there?
& how warm is it over in {city}[, in {unit} please]?
? What's the weather like?
? Do I need an umbrella?
> temperature int:-9:36; condition pick:sunny|rain|cloudy|snow|fog|windy|clear; humidity int:20:98

#weather get_forecast,weather_forecast,forecastWeather
Weather forecast for the coming days.
@city|location city! City to forecast
@days int:2:10! Number of days
& what will the weather be in {city} over the next {days} days?
& give me the {days} day forecast for {city}
& forecast for {city}, {days} days
& how will the weather in {city} develop over {days} days?
& I need a {days}-day outlook for {city}
& Will it rain in {city} in the next {days} days?
& show me what the sky does in {city} for {days} days
>> day pick:Mon|Tue|Wed|Thu|Fri; high int:5:30; low int:-5:12

#mail send_email,send_mail,mail_send,sendEmail,email.send
Send an email to one recipient.
@to|recipient|address email! Recipient address
@subject title! Subject line
@body|text|message text! Text of the mail
send an email to {to} with the subject "{subject}" saying "{body}"
mail {to} about "{subject}": {body}
write to {to}, subject {subject}, body: {body}
send {to} a mail with subject "{subject}" and text "{body}"
email {to}, subject "{subject}", message "{body}"
drop a line to {to} titled "{subject}" that says "{body}"
Let {to} know: "{body}". Use the subject "{subject}".
fire off a message to {to} with the subject line "{subject}" and the body "{body}"
compose a mail for {to}. Subject: {subject}. Text: {body}
> status pick:sent|queued; id id

#mailread list_emails,read_inbox,inbox_list,listMessages
List messages in the inbox.
@folder word Mail folder
@unread_only bool Only unread mail
@limit int:3:30 Number of messages
show my inbox
list my emails[ in the {folder} folder]
what's new in my mail?
check my mail[, only unread ones|unread_only=true]
show me the last {limit} messages[ in {folder}]
do I have any new mail?
list {limit} unread mails|unread_only=true
read out what's in my mailbox
Any messages for me?
>> from email; subject title

#mailsearch search_emails,find_mail,mail_search
Search the mailbox for messages.
@query topic! Words to search for
@sender email Only from this sender
find emails about {query}[ from {sender}]
search my mail for {query}
look for messages about {query} in my mailbox
did anyone write to me about {query}?
find the mail[ from {sender}] that mentions {query}
which emails talk about {query}?
dig up the message about {query}[ sent by {sender}]
>> subject title; date date

#remind create_reminder,set_reminder,add_reminder,remindMe,reminders.create
Create a reminder.
@text|task|title task! What to be reminded of
@time|when when! When to remind
remind me to {text} {time}
set a reminder to {text} {time}
please remind me {time} to {text}
create a reminder {time}: {text}
don't let me forget to {text} {time}
I need to {text} {time}, remind me
add a reminder: {text}, {time}
ping me {time} so that I {text}
Make sure I remember to {text} {time}.
put a reminder in for {time} to {text}
{time} I have to {text}. Set a reminder.
? remind me of something {time}
? set a reminder for {time}
> status pick:created|saved; id id

#remindlist list_reminders,show_reminders,get_reminders
List the reminders that are set.
@date date_raw Only this day
what reminders do I have[ on {date}]?
show my reminders[ for {date}]
list all my reminders
which reminders are set[ for {date}]?
Do I have any reminders[ on {date}]?
what did I ask you to remind me of?
read me my reminders
>> id id; text task

#reminddel delete_reminder,remove_reminder,cancelReminder
Delete a reminder by its id.
@reminder_id|id id! Id of the reminder
& delete reminder {reminder_id}
& remove the reminder {reminder_id}
& cancel reminder number {reminder_id}
& get rid of reminder {reminder_id}
& I no longer need reminder {reminder_id}
& drop the reminder with id {reminder_id}
& scratch reminder {reminder_id}
? delete a reminder
? cancel one of my reminders
> deleted pick:true; id id

#calendar create_event,add_calendar_event,calendar_create,createEvent,calendar.add
Create a calendar event.
@title|summary|name title! Title of the event
@date date! Day as YYYY-MM-DD
@time clock Start time as HH:MM
@duration_minutes int:15:180 Length in minutes
@location place Where it is
add "{title}" to my calendar on {date}[ at {time}][ for {duration_minutes} minutes]
schedule {title} on {date}[ at {time}]
put {title} in the calendar for {date}[, {time}][, location {location}]
create an event called "{title}" on {date}[ at {time}][ in {location}]
book a meeting "{title}" on {date}[ at {time}][ lasting {duration_minutes} minutes]
block {date} for "{title}"
set up {title} for {date}[ at {time}][, {duration_minutes} minutes]
I have {title} on {date}[ at {time}], add it to my calendar
new event: {title}, {date}[, {time}][, at {location}]
> status pick:created|confirmed; event_id id

#callist list_events,get_calendar,calendar_list,showAgenda
List calendar events of a day.
@date date! Day as YYYY-MM-DD
& what's on my calendar on {date}?
& show my agenda for {date}
& what do I have planned on {date}?
& list the events of {date}
& am I free on {date}?
& do I have anything on {date}?
& look at my schedule for {date}
& which meetings are on {date}?
? what's on my calendar?
? show me my agenda
>> title title; time clock

#caldel delete_event,cancel_event,removeEvent
Remove an event from the calendar.
@event_id id! Event id
@notify bool Tell the guests
& delete event {event_id}[ and tell the guests|notify=true]
& cancel the event {event_id}[, without telling the guests|notify=false]
& take {event_id} off my calendar
& remove meeting {event_id} from the calendar
& call off the appointment {event_id}[ and let the guests know|notify=true]
& clear event {event_id}
> status pick:deleted|cancelled

#fileread read_file,open_file,cat_file,readFile,file.read
Read a text file.
@path|file|filename path! Path of the file
& read {path}
& show me what is inside {path}
& open {path}
& what does {path} say?
& print the contents of {path}
& cat {path}
& let me see {path}
& what's written in {path}?
& display the file {path}
& I want to look at {path}
& check the file {path} and tell me what's in it
? read a file for me
? open the file
>= sentence

#filewrite write_file,save_file,create_file,writeFile
Write text to a file.
@path|file path! Path of the file
@content|text text! Text to write
@append bool Append instead of replacing
write "{content}" to {path}
save "{content}" in {path}
create the file {path} with the content "{content}"
put "{content}" into {path}
store the text "{content}" in a file called {path}
make a file {path} that contains "{content}"
append "{content}" to {path}|append=true
add "{content}" to the end of {path}|append=true
overwrite {path} with "{content}"|append=false
> bytes_written int:4:400; path path

#filelist list_files,list_directory,ls,listFolder
List the files in a folder.
@path|directory|folder dir! Folder
@hidden|show_hidden bool Include hidden files
& list the files in {path}
& what's in {path}?
& ls {path}
& show me the folder {path}[ including hidden files|hidden=true]
& which files are in {path}?
& what files are there in {path}[, hidden ones too|hidden=true]?
& look into the directory {path}
& list everything in {path}[, including hidden files|hidden=true]
? list the files
>> name path; size int:10:9000

#filedel delete_file,remove_file,rm,deleteFile
Delete a file.
@path|file path! File to delete
& delete {path}
& remove the file {path}
& get rid of {path}
& rm {path}
& erase {path}
& throw away {path}
& {path} is no longer needed, delete it
& please wipe {path} from the disk
? delete a file
> status pick:deleted|removed

#filemove move_file,rename_file,mv,moveFile
Move or rename a file.
@source|src path! Old path
@destination|dest path! New path
move {source} to {destination}
rename {source} to {destination}
mv {source} {destination}
{source} should be called {destination}, rename it
put {source} at {destination}
change the name of {source} to {destination}
relocate {source} to {destination}
> status pick:moved|renamed

#filefind find_files,search_files,glob,findFile
Find files by name pattern.
@pattern glob! Name pattern
@path|directory dir Start folder
find all files that match {pattern}[ in {path}]
search for {pattern}[ under {path}]
look for files named {pattern}[ in {path}]
where are the {pattern} files?
glob {pattern}[ in {path}]
locate {pattern}[ below {path}]
>> path path

#grep grep,search_text,grep_code,searchContent
Search file contents for a text.
@query|pattern word! Text to find
@path|directory dir Folder to search
grep for {query}[ in {path}]
search the code for {query}[ under {path}]
where is {query} used[ in {path}]?
find occurrences of {query}[ in {path}]
which files contain {query}?
look for the word {query} inside the files[ of {path}]
>> file path; line int:1:900

#edit edit_file,replace_in_file,str_replace,editFile
Replace a text in a file.
@path|file path! File
@old|old_text word! Text to replace
@new|new_text word! New text
replace {old} with {new} in {path}
in {path} change {old} to {new}
edit {path}: {old} becomes {new}
swap {old} for {new} in the file {path}
substitute {new} for {old} in {path}
rename {old} to {new} in {path}
> replacements int:1:20

#shell run_command,bash,shell,exec,execute_command,runShell,terminal
Run a shell command.
@command|cmd cmd! Command line
run {command}
execute `{command}`
run the command `{command}`
run {command} in the shell
type {command} in the terminal
please do a {command}
start {command}
run the tests with {command}
build it with {command}
what does `{command}` print?
can you launch {command} for me
use the shell to run `{command}`
? run a command for me
> exit_code int:0:2; output sentence

#search web_search,search_web,google_search,searchWeb,internet.search
Search the web.
@query|q topic! Search words
@limit|max_results int:2:20 Number of results
& search the web for {query}
& look up {query} online
& google {query}
& find {limit} articles about {query} on the internet
& search online for {query}[, {limit} results]
& what does the internet say about {query}?
& find information on {query}
& I want to read about {query}, search the web[ and give me {limit} hits]
& do a web search on {query}
& What can you find about {query} on the web?
? search the web
? look something up online
>> title title; url url

#fetch fetch_url,open_url,get_page,httpGet,browse
Fetch a web page.
@url|link url! Address
& fetch {url}
& open {url}
& download {url}
& what's on the page {url}?
& load {url} and tell me what it says
& visit {url}
& read the page at {url}
& go to {url}
? open a web page
>= sentence

#calc calculator,calculate,eval_expression,compute
Evaluate an arithmetic expression.
@expression|expr expr! Expression
& what is {expression}?
& calculate {expression}
& compute {expression}
& how much is {expression}?
& evaluate {expression}
& work out {expression}
& solve {expression} with the calculator
& {expression} = ?
> result num:1:9999

#currency convert_currency,exchange_rate,currency_convert,convertMoney
Convert an amount between currencies.
@amount money! Amount
@from|from_currency|source currency! Currency code to convert from
@to|to_currency|target currency! Currency code to convert to
convert {amount} {from} to {to}
how much is {amount} {from} in {to}?
what's {amount} {from} in {to}?
change {amount} {from} into {to}
I have {amount} {from}, how many {to} is that?
exchange {amount} {from} for {to}
give me {amount} {from} in {to}
I need {to} for {amount} {from}, what do I get?
> result num:1:9999; rate num:0:9

#timer set_timer,start_timer,timer,startTimer
Start a countdown timer.
@minutes|duration int:1:120! Minutes
@label|name label Label
& set a timer for {minutes} minutes
start a {minutes} minute timer[ called {label}]
timer {minutes} minutes[ for the {label}]
count down {minutes} minutes
wake me in {minutes} minutes
let me know when {minutes} minutes have passed
the {label} needs {minutes} minutes, set a timer|
I need a {minutes}-minute timer[ labelled {label}]
? set a timer
? start a timer for me
> status pick:started|running; timer_id id

#alarm set_alarm,create_alarm,alarm_set,setAlarm
Set an alarm clock.
@time clock! Time as HH:MM
@repeat enum:daily|weekdays|weekends Repetition
& set an alarm for {time}
& wake me up at {time}[, {repeat}]
& alarm at {time}[ {repeat}]
& I have to get up at {time}
& ring at {time}[ on {repeat}]
& make the alarm go off at {time}
? set an alarm
? wake me up
> status pick:set; alarm_id id

#note create_note,add_note,save_note,noteCreate,notes.add
Save a note.
@title title Title
@content|text|body text! Text of the note
note down "{content}"
take a note: {content}
save a note[ titled "{title}"] saying "{content}"
write down: {content}
make a note[ called "{title}"] with the text "{content}"
jot down "{content}"[ under the title "{title}"]
add to my notes: {content}
remember this for later: {content}
? take a note
> status pick:saved; note_id id

#notefind search_notes,find_note,notes_search
Search the saved notes.
@query|keyword word! Word to search
& find my note about {query}
& search my notes for {query}
& what did I write down about {query}?
& which of my notes mention {query}?
& look through my notes for {query}
& do I have a note on {query}?
>> title title; text sentence

#ticket create_ticket,open_ticket,ticket_create,createIssue,submit_ticket
Open a support ticket.
@title|subject|summary title! Short title
@priority enum:low|medium|high|urgent Priority
@description|details text Longer description
open a[ {priority} priority] ticket titled "{title}"
create a ticket "{title}"[ with {priority} priority]
Our printer is broken, open a[ {priority} priority] ticket titled "{title}"
file a support ticket called "{title}"[, priority {priority}][, description "{description}"]
The server room is too hot, log a ticket "{title}"[, {priority}]
submit an issue: {title}[. Priority: {priority}]
I need a ticket for "{title}"[, {priority} priority]
raise a ticket with the title "{title}"[ and the description "{description}"]
something is wrong with my laptop, make a ticket "{title}"[ and mark it {priority}]
> ticket_id id; status pick:open|new

#ticketget get_ticket,ticket_status,show_ticket,ticketInfo
Look up a ticket.
@ticket_id|id|number id! Ticket id
& what's the status of ticket {ticket_id}?
& show ticket {ticket_id}
& how far is {ticket_id}?
& look up the ticket {ticket_id}
& has ticket {ticket_id} been solved?
& check on ticket {ticket_id}
& any news on {ticket_id}?
? what's the status of my ticket?
? check my ticket
> status pick:open|closed|waiting|solved; assignee person

#ticketclose close_ticket,resolve_ticket,ticketClose
Close a ticket.
@ticket_id|id id! Ticket id
@reason|comment text Why
close ticket {ticket_id}[ with the comment "{reason}"]
& mark {ticket_id} as resolved
& ticket {ticket_id} is done, close it
resolve {ticket_id}[, reason: {reason}]
& shut ticket {ticket_id}
& you can close {ticket_id} now
> status pick:closed|resolved

#contact find_contact,lookup_contact,search_contacts,getContact,contacts.find
Look up a person in the address book.
@name|person|query person! Name
& what's the phone number of {name}?
& find {name} in my contacts
& how can I reach {name}?
& look up {name}
& give me the contact details of {name}
& what is {name}'s email address?
& do you have the number of {name}?
& I need to get in touch with {name}, find the details
? look up a contact
? find someone in my address book
> phone phone; email email

#contactadd add_contact,create_contact,contactCreate
Save a new contact.
@name person! Name
@phone phone Phone number
@email email Mail address
add {name} to my contacts[, phone {phone}][, email {email}]
save {name} with the number {phone}
new contact: {name}[, {phone}][, {email}]
create a contact for {name}[ with the address {email}]
store {name}'s number {phone}
put {name}[ ({email})] in the address book
> status pick:saved|added; contact_id id

#sms send_message,send_sms,text_message,sendText
Send a text message to a person.
@to|recipient|contact person! Who gets it
@text|message|body text! The message
text {to} "{text}"
send {to} a message saying "{text}"
message {to}: {text}
tell {to} that {text}
let {to} know "{text}"
send a text to {to}: {text}
write {to} "{text}"
shoot {to} a text saying "{text}"
? send a message saying "{text}"
> status pick:sent|delivered

#call make_call,call_contact,phone_call,dial
Call a person on the phone.
@name|contact|person person! Who to call
& call {name}
& ring {name}
& phone {name}
& dial {name}
& get {name} on the line
& I want to talk to {name}, call them
& give {name} a ring
? make a call
? call someone
> status pick:calling|connected

#music play_music,play_song,music_play,playTrack,spotify.play
Play music.
@query|song|track title! Song, album or artist
@volume int:5:95 Volume in percent
& play {query}
& put on {query}
& I want to hear {query}
play {query}[ at volume {volume}]
& start the song {query}
listen to {query}[, volume {volume}]
& let's hear {query}
& turn on {query}
? play some music
? put a song on
> status pick:playing; track title

#musicctl pause_music,stop_music,music_stop
Stop the music that plays.
@device device Speaker
stop the music[ in the {device}]
pause the music[ on the {device}]
turn the music off
be quiet, stop playing
silence the speaker[ in the {device}]
no more music please
> status pick:stopped|paused

#volume set_volume,volume,setVolume
Set the speaker volume.
@level|volume int:0:100! Percent
@device device Speaker
set the volume to {level}[ in the {device}]
volume {level}
make it {level} percent loud
turn the sound to {level}[ on the {device}]
put the {device} speaker at {level}
change the volume to {level} percent
? change the volume
> volume int:0:100

#maps get_directions,route,directions,navigate,maps.route
Get directions between two places.
@origin|from|start city! Start
@destination|to|end city! Goal
@mode enum:driving|walking|cycling|transit Means of travel
how do I get from {origin} to {destination}[ by {mode}]?
directions from {origin} to {destination}[, {mode}]
navigate from {origin} to {destination}
what's the way from {origin} to {destination}[, {mode}]?
I am in {origin} and want to go to {destination}, show me the route
find a[ {mode}] route from {origin} to {destination}
route {origin} to {destination}
take me to {destination} from {origin}
> distance_km int:2:900; duration_minutes int:5:600

#distance get_distance,distance_between,calcDistance
Distance between two cities.
@from|city_a|origin city! First city
@to|city_b|destination city! Second city
how far is it from {from} to {to}?
what's the distance between {from} and {to}?
how many kilometres are there between {from} and {to}?
distance {from} {to}
how far apart are {from} and {to}?
measure the distance from {from} to {to}
> kilometers int:20:9000

#translate translate_text,translate,translateText
Translate a text.
@text phrase! Text to translate
@target|target_language|to lang! Language to translate into
@source lang Language of the text
translate "{text}" to {target}
how do you say "{text}" in {target}?
what is "{text}" in {target}?
put "{text}" into {target}
translate "{text}" from {source} to {target}
I need "{text}" in {target}
say "{text}" in {target}
give me the {target} for "{text}"
> translation pseudo

#flight search_flights,find_flights,flight_search,searchFlights
Search for flights.
@origin|from|departure_city city! From
@destination|to|arrival_city city! To
@date|departure_date date! Day as YYYY-MM-DD
@passengers int:2:6 Number of travellers
find flights from {origin} to {destination} on {date}[ for {passengers} people]
I want to fly from {origin} to {destination} on {date}
search flights {origin} to {destination}, {date}[, {passengers} passengers]
are there flights from {origin} to {destination} on {date}?
we are {passengers} people and need to get from {origin} to {destination} by plane on {date}
show me flights to {destination} from {origin} for {date}
look for a flight on {date} from {origin} to {destination}
how can I fly to {destination} from {origin} on {date}?
>> flight id; price int:40:900

#flightstat flight_status,track_flight,flightInfo
Status of a flight.
@flight|flight_number flightno! Flight number
& is flight {flight} on time?
& what's the status of {flight}?
& track {flight}
& when does {flight} land?
& has {flight} departed?
& is {flight} delayed?
& check flight {flight}
? is my flight on time?
? check the status of my flight
> status pick:on time|delayed|landed|boarding; gate id

#hotel search_hotels,find_hotel,hotel_search,bookHotel
Find hotels in a city.
@city|location city! City
@check_in|from_date date First night as YYYY-MM-DD
@nights int:1:14 Number of nights
@max_price int:40:400 Highest price a night
find a hotel in {city}[ from {check_in}][ for {nights} nights]
I need a place to stay in {city}[ for {nights} nights][, at most {max_price} a night]
search hotels in {city}[ under {max_price}]
where can I sleep in {city}[ on {check_in}]?
show me hotels in {city}[ for {nights} nights][ below {max_price}]
look for accommodation in {city}[ starting {check_in}]
& find me somewhere to stay in {city}
? find me a hotel
>> name title; price int:40:400

#train find_trains,train_schedule,trains,searchTrains
Look up train connections.
@from|origin|from_station city! From
@to|destination|to_station city! To
@time|departure clock Departure as HH:MM
when does the next train from {from} to {to} leave?
trains from {from} to {to}[ after {time}]
find a train from {from} to {to}[ at {time}]
I want to take the train to {to} from {from}[ at {time}]
which trains go from {from} to {to}[ after {time}]?
show me rail connections {from} to {to}
how do I get to {to} from {from} by rail?
>> departure clock; platform int:1:20

#taxi book_taxi,order_cab,request_ride,bookRide
Order a taxi.
@pickup|from address! Where to start
@dropoff|to|destination address! Where to go
@time clock Pickup time as HH:MM
get me a taxi from {pickup} to {dropoff}[ at {time}]
order a cab from {pickup} to {dropoff}[ for {time}]
I need a ride from {pickup} to {dropoff}
book a taxi to {dropoff} from {pickup}[ at {time}]
call a car to take me from {pickup} to {dropoff}
pick me up at {pickup} and drive me to {dropoff}[ at {time}]
> driver person; eta_minutes int:2:30

#sql run_sql,query_database,sql_query,executeSql,db.query
Run an SQL query.
@query|sql|statement sql! SQL text
run this query: {query}
execute {query}
query the database with {query}
run {query} on the database
what does {query} return?
please send the statement {query} to the database
can you run the SQL {query}
>> id int:1:500; name person

#git git_commit,commit_changes,commit,gitCommit
Commit the changes.
@message|msg text! Commit message
@push bool Push afterwards
commit with the message "{message}"[ and push|push=true]
commit the changes: {message}
make a commit "{message}"[ but don't push|push=false]
git commit with message "{message}"[, then push it|push=true]
save my work in git as "{message}"
check in the changes with "{message}"
> commit hex; files_changed int:1:30

#gitlog git_log,show_commits,gitHistory
Show the latest commits.
@count|limit|n int:2:40 How many
@branch branch Branch
show the last {count} commits[ on {branch}]
git log[ of {branch}]
what was committed lately[ on {branch}]?
list {count} commits[ of the branch {branch}]
who changed what recently[ on {branch}]?
history of the repository
>> commit hex; message text

#gitbranch create_branch,new_branch,gitBranch,checkout_branch
Create a git branch.
@name|branch branch! Name of the branch
@base|from branch Start point
create a branch {name}[ from {base}]
make a new branch called {name}[ based on {base}]
branch off {base} as {name}
start the branch {name}
I want to work on a new branch {name}
open branch {name}[ off {base}]
> status pick:created

#light set_light,control_light,lights,setLight,home.light
Switch or dim a light in a room.
@room|area room! Room
@state enum:on|off! Switch on or off
@brightness int:5:100 Brightness in percent
turn {state} the light in the {room}
turn the {room} lights {state}
switch {state} the lamp in the {room}
lights {state} in the {room}
It's too dark in the {room}, turn the light on|state=on
I'm leaving the {room}, turn the light off|state=off
set the {room} light to {brightness} percent|state=on
make the {room} lights go {state}
{room} light {state} please
> status pick:ok|done; room room

#heat set_thermostat,set_temperature,heating,setHeating
Set the temperature of a room.
@room room Room
@temperature|degrees int:15:27! Degrees
set the temperature to {temperature} degrees[ in the {room}]
make it {temperature} degrees[ in the {room}]
heat the {room} to {temperature}
I'm cold, set the heating to {temperature}[ in the {room}]
turn the thermostat to {temperature}
warm up the {room} to {temperature} degrees
{temperature} degrees in the {room} please
? change the temperature
> status pick:ok|heating; target int:15:27

#door lock_door,door_lock,lockDoor
Lock or unlock a door.
@door door! Which door
@action enum:lock|unlock! What to do
{action} the {door}
please {action} my {door}
can you {action} the {door}
the {door} should be {action}ed
I forgot about the {door}, {action} it
> status pick:locked|unlocked|ok

#time get_time,current_time,time_in,getTime,world_clock
Current time in a city.
@city|location|timezone city! City
& what time is it in {city}?
& tell me the time in {city}
& how late is it in {city}?
& current time in {city}
& is it already morning in {city}?
& what's the local time for {city}?
& look at the clock in {city}
? what time is it there?
> time clock; timezone pick:CET|EST|UTC|JST|PST

#stock get_stock_price,stock_quote,stock_price,getQuote
Price of a stock.
@symbol|ticker ticker! Ticker symbol
& what's the price of {symbol}?
& how much is a share of {symbol}?
& stock price of {symbol}
& how is {symbol} doing on the market?
& quote {symbol}
& where does {symbol} trade right now?
& check the stock {symbol}
? check a stock price
> price num:1:900; change num:0:9

#crypto get_crypto_price,coin_price,cryptoQuote
Price of a crypto coin.
@coin coin! Name of the coin
@currency currency Currency code
& what is {coin} worth?
how much is one {coin}[ in {currency}]?
& price of {coin}
& what does {coin} cost right now?
show the {coin} rate[ in {currency}]
& how is {coin} doing?
> price num:1:90000

#order get_order,order_status,track_order,orderStatus
Status of an order.
@order_id|order_number|id id! Order number
& where is my order {order_id}?
& what's the status of order {order_id}?
& track order {order_id}
& has {order_id} shipped yet?
& when will {order_id} arrive?
& I'm still waiting for my package, the order is {order_id}
& check order {order_id}
& my shoes haven't come, look into order {order_id}
? where is my order?
? what's the status of my order?
> status pick:shipped|processing|delivered|lost; eta date

#ordercancel cancel_order,order_cancel,cancelOrder
Cancel an order.
@order_id|id id! Order number
@reason text Why
& cancel order {order_id}
cancel my order {order_id}[ because "{reason}"]
& I don't want {order_id} any more, cancel it
& stop the order {order_id}
& please withdraw my purchase {order_id}
& call off order {order_id}
? cancel my order
? I want to cancel an order
> status pick:cancelled|refused

#refund request_refund,refund_order,refundPayment
Refund a payment.
@order_id|payment_id id! Order number
@amount money Amount to refund
refund order {order_id}
give the customer {amount} back for {order_id}
I want my money back for {order_id}
pay back {amount} on order {order_id}
issue a refund of {amount} for {order_id}
& reimburse {order_id}
? I'd like a refund
> status pick:refunded|pending; reference id

#parcel track_package,track_parcel,parcel_status,trackShipment
Track a parcel.
@tracking_number|code id! Tracking number
@carrier carrier Carrier
where is the parcel {tracking_number}[ from {carrier}]?
& track the package {tracking_number}
track {carrier} shipment {tracking_number}
& has the shipment {tracking_number} arrived?
& look up tracking number {tracking_number}
& where's my package? The code is {tracking_number}
? where is my package?
> status pick:in transit|delivered|at depot; city city

#user get_user,lookup_user,user_info,getUser
Look up a user account.
@user_id|username|login user! User name
& who is {user_id}?
& show the account of {user_id}
& look up user {user_id}
& get the profile of {user_id}
& give me details on the user {user_id}
& is {user_id} an active user?
& what do we know about user {user_id}?
> name person; email email; active pick:true|false

#useradd create_user,add_user,createAccount
Create a user account.
@username|login user! Login name
@email email! Mail address
@admin bool Administrator rights
create a user {username} with the address {email}[ and admin rights|admin=true]
add {username} ({email}) as a user[, not as admin|admin=false]
new account for {username}, email {email}[, make it an admin|admin=true]
sign up {username} with {email}
set up an account {username} for {email}
register {username} using {email}
> user_id id

#password reset_password,password_reset,resetPassword
Reset the password of a user.
@username|user user! User name
& reset the password of {username}
& {username} forgot their password, reset it
& {username} can't log in any more, reset the password
& send {username} a new password
& give {username} a fresh password
& I need a password reset for {username}
? reset a password
? I forgot my password
> status pick:sent|reset

#restaurant find_restaurants,search_restaurant,restaurants,findRestaurant
Find restaurants.
@city|location city! City
@cuisine cuisine Kind of food
where can I eat {cuisine} food in {city}?
find a[ {cuisine}] restaurant in {city}
I'm hungry, show me restaurants in {city}
looking for {cuisine} places in {city}
what are good restaurants in {city}[ for {cuisine} food]?
& any place to have dinner in {city}?
suggest somewhere to eat in {city}[, {cuisine}]
? find me a restaurant
>> name title; rating num:1:5

#table book_table,reserve_table,makeReservation
Reserve a table in a restaurant.
@restaurant|venue title! Restaurant
@people|party_size|guests int:1:12! Number of guests
@time clock! Time as HH:MM
@date date Day as YYYY-MM-DD
book a table at {restaurant} for {people} at {time}[ on {date}]
reserve a table for {people} people at {restaurant}, {time}[, {date}]
we're {people} and want to eat at {restaurant} at {time}[ on {date}]
get us a table for {people} at {restaurant} at {time}
dinner for {people} at {restaurant} at {time}[ on {date}], please reserve
make a reservation at {restaurant}[ on {date}] for {people} at {time}
> status pick:confirmed; reservation id

#recipe find_recipe,search_recipes,recipe,getRecipe
Find a cooking recipe.
@dish|query dish! Dish
@vegetarian bool Only vegetarian
& how do I cook {dish}?
& find a recipe for {dish}
find a vegetarian recipe for {dish}|vegetarian=true
& I want to make {dish}, how does it go?
& what do I need for {dish}?
show me a[ vegetarian|vegetarian=true] {dish} recipe
& teach me to prepare {dish}
? find a recipe
> title title; minutes int:10:120

#shop add_to_cart,cart_add,addToCart
Put a product into the shopping cart.
@product|item product! Product
@quantity|count int:2:20 How many
put {quantity} {product} in my cart
& add {product} to the cart
I want to buy {quantity} {product}
order {quantity} {product}, put them in the basket
& drop {product} into my shopping basket
add {quantity} of the {product} to my basket
> items int:1:30; total num:1:500

#list add_to_list,list_add,shoppingList,add_todo
Add an entry to a named list.
@item|entry product! What to add
@list|list_name label! Which list
add {item} to my {list} list
put {item} on the {list} list
{item} goes on the {list} list
I need {item}, write it on my {list} list
my {list} list should have {item} on it
include {item} in the {list} list
? add something to my {list} list
> status pick:added; entries int:1:40

#task create_task,add_task,todo_add,createTodo
Create a task.
@title|task|name title! What to do
@due|due_date date Due day as YYYY-MM-DD
@assignee|owner person Who does it
@tags list:word Tags
create a task "{title}"[ due {due}][ for {assignee}]
add the task "{title}"[, due on {due}]
new to-do: {title}[, assigned to {assignee}]
give {assignee} the task "{title}"[ by {due}]
put "{title}" on the task board[ with the tags {tags}]
make a task called "{title}"[ tagged {tags}]
track "{title}" as a task[, due {due}][, tags {tags}]
> task_id id; status pick:open

#taskdone complete_task,finish_task,task_done,completeTodo
Mark a task as done.
@task_id|id id! Task id
& mark task {task_id} as done
& I finished {task_id}
& complete {task_id}
& task {task_id} is ready, tick it off
& check off {task_id}
& set {task_id} to completed
? mark a task as done
> status pick:done|completed

#news get_news,latest_news,news,headlines
Latest news on a topic.
@topic|subject topic! Topic
@count|limit int:2:10 Number of articles
& what's the news about {topic}?
& any headlines on {topic}?
give me {count} news stories about {topic}
& what's happening with {topic}?
& latest news on {topic}
& read me the news on {topic}
? what's in the news?
>> title title; source word

#define define_word,dictionary,lookup_word,defineWord
Look up a word in the dictionary.
@word|term word! Word
@language lang Language
& what does {word} mean?
& define {word}
& what's the meaning of {word}?
& look up the word {word}
look up {word} in a {language} dictionary
& explain the word {word}
& give me a definition of {word}
? look up a word
> definition sentence

#image generate_image,create_image,draw,makePicture
Create a picture from a description.
@prompt|description topic! What to draw
@size enum:small|medium|large Size
& draw {prompt}
make a[ {size}] picture of {prompt}
& generate an image of {prompt}
& I'd like to see a drawing of {prompt}
paint {prompt}[ in {size} size]
create a[ {size}] illustration showing {prompt}
? draw me something
> url url

#bank get_balance,account_balance,check_balance,getBalance
Balance of a bank account.
@account|account_id id! Account number
& how much money is on account {account}?
& what's the balance of {account}?
& check the balance of account {account}
& how much is left on {account}?
& can I afford it? Look at account {account}
& balance for {account}
? how much money do I have?
? what's my balance?
> balance num:1:9000; currency currency

#transfer transfer_money,send_money,bank_transfer,transferFunds
Transfer money to an account.
@amount money! Amount
@to|to_account|recipient id! Receiving account
@from|from_account id Paying account
@note|reference text Reference text
transfer {amount} to {to}[ from {from}]
send {amount} to account {to}[ from {from}][ with the note "{note}"]
pay {amount} to {to}
move {amount} from {from} to {to}
wire {amount} to {to}[, reference "{note}"]
I owe {to} {amount}, transfer it
> status pick:done|pending; transaction id

#invoice create_invoice,invoice_create,sendInvoice
Create an invoice for a customer.
@customer|client person! Customer
@amount money! Amount
@due|due_date date Due day as YYYY-MM-DD
bill {customer} for {amount}[, due {due}]
create an invoice for {customer} over {amount}[ due {due}]
invoice {customer}, {amount}[, payable by {due}]
{customer} owes us {amount}, write an invoice
make out an invoice of {amount} to {customer}
charge {customer} {amount} on an invoice[ due on {due}]
> invoice_id id

#deploy deploy_service,deploy,release,deployApp
Deploy a service.
@service|app service! Service
@environment|env enum:staging|production|testing! Environment
@version ver Version
deploy {service} to {environment}
roll out {service}[ version {version}] on {environment}
ship {service}[ {version}] to {environment}
put {service}[ {version}] on {environment}
release {service} to {environment}[, version {version}]
push {service}[ {version}] out to {environment}
> status pick:deployed|started; build id

#restart restart_service,service_restart,restartServer
Restart a service.
@service|name service! Service
& restart {service}
& {service} hangs, restart it
& bounce {service}
& give {service} a restart
& kick {service} again
& please reboot the service {service}
& {service} is not answering, bring it back up
? restart a service
> status pick:restarted|running

#logs get_logs,read_logs,tail_logs,fetchLogs
Read the log of a service.
@service service! Service
@lines|limit int:10:500 Number of lines
@level enum:debug|info|warning|error Lowest level
show the logs of {service}
what do the logs of {service} say?
last {lines} lines of the {service} log
any errors in {service}?|level=error
tail {service}[, {lines} lines]
get {lines} log lines[ at level {level}] from {service}
& check the log of {service}
>= sentence

#server server_status,check_server,ping_host,serverHealth
Check whether a host is up.
@host|server|hostname host! Host name
& is {host} up?
& ping {host}
& check the health of {host}
& is {host} down again?
& the site seems slow, have a look at {host}
& how is {host} doing?
? is the server up?
> status pick:up|down|degraded; latency_ms int:1:400

#scale scale_service,set_replicas,scaleDeployment
Set the number of replicas.
@service service! Service
@replicas|count int:1:40! How many
scale {service} to {replicas}
run {replicas} copies of {service}
set {service} to {replicas} replicas
I want {replicas} instances of {service}
{service} needs {replicas} replicas
bring {service} to {replicas} instances
> replicas int:1:40

#issue create_issue,open_issue,github_issue,newIssue
Open an issue in a repository.
@repo|repository repo! Repository
@title title! Title
@labels list:word Labels
open an issue in {repo} titled "{title}"[ with the labels {labels}]
file a bug in {repo}: "{title}"
report "{title}" in the repository {repo}[, labels {labels}]
create an issue "{title}" in {repo}[ labelled {labels}]
there's a bug, put "{title}" into {repo}
> number int:1:9000; url url

#pr list_pull_requests,open_prs,listPRs
List pull requests of a repository.
@repo|repository repo! Repository
@state enum:open|closed|merged State
& list the pull requests of {repo}
show the {state} pull requests in {repo}
& what's waiting for review in {repo}?
which pull requests are {state} in {repo}?
& any PRs in {repo}?
what has been {state} in {repo}?
>> number int:1:900; title title

#joke tell_joke,get_joke,random_joke
Get a joke.
@topic word Topic
tell me a joke[ about {topic}]
make me laugh
do you know a joke[ about {topic}]?
I need something funny[ about {topic}]
a joke please
say something funny
>= sentence

#dice roll_dice,dice,rollDice
Roll dice.
@sides int:4:20! Sides of a die
@count int:2:9 Number of dice
roll a {sides} sided die
roll {count} dice with {sides} sides
throw {count} {sides}-sided dice
give me a roll of a d{sides}
> result int:1:60

#unit convert_units,unit_convert,convertUnit
Convert a quantity between units.
@value|amount|quantity money! Number
@from|from_unit unit! Unit of the number
@to|to_unit unit! Unit wanted
convert {value} {from} to {to}
how many {to} are {value} {from}?
what is {value} {from} in {to}?
{value} {from} in {to}
turn {value} {from} into {to}
express {value} {from} in {to}
> result num:1:9999

#movie search_movies,find_movie,movies,movieSearch
Search for a movie.
@title|query title! Title
@year int:1950:2026 Year
find the movie {title}[ from {year}]
search for the film {title}
look up {title}[ ({year})]
& what do you know about the movie {title}?
when did the film {title}[ of {year}] come out?
& is {title} a good movie?
? find a movie
> director person; rating num:1:10

#post create_post,publish_post,post_message,tweet
Publish a post in a channel.
@channel|to channel! Channel
@text|content|message text! Text
post "{text}" in {channel}
publish "{text}" on {channel}
share "{text}" with {channel}
write "{text}" to the channel {channel}
announce in {channel}: {text}
say "{text}" in {channel}
> status pick:posted; post_id id

#meet find_meeting_room,free_rooms,findRoom
Find a free meeting room.
@people|capacity int:2:40! Seats needed
@date date Day as YYYY-MM-DD
@time clock Time as HH:MM
find a meeting room for {people} people[ on {date}][ at {time}]
I need a room with {people} seats[ at {time}]
which rooms fit {people}[ on {date}]?
where can {people} of us meet[ on {date}][ at {time}]?
is there a free room for {people}[ at {time}]?
>> room title; floor int:1:12

#invite invite_people,send_invites,inviteGuests
Invite people to an event.
@event|event_name title! Event
@guests|people|attendees list:person! Who
invite {guests} to {event}
send invitations for {event} to {guests}
{guests} should come to {event}, invite them
ask {guests} to join {event}
add {guests} as guests of {event}
> invited int:1:9

#profile update_profile,edit_profile,setProfile
Change details of a customer.
@customer_id|id id! Customer number
@changes|fields obj:city+city,phone+phone,email+email! Fields to change
change customer {customer_id}: {changes}
update {customer_id} with {changes}
for customer {customer_id} set {changes}
customer {customer_id} moved, new data: {changes}
edit the record {customer_id}: {changes}
> status pick:updated

#orderplace place_order,create_order,newOrder
Place an order with delivery address.
@items list:product! Products
@address obj:street+address,city+city! Where to deliver
@express bool Express delivery
order {items}, deliver to {address}[, express please|express=true]
place an order for {items} with the address {address}
send {items} to {address}[ by express|express=true]
I'd like to buy {items}; ship to {address}
buy {items} and have them delivered, {address}
> order_id id; total num:1:900

#rowadd insert_row,add_record,insertRecord
Insert a row into a table.
@table word! Table
@values|row obj:name+person,age+int,city+city! Column values
insert {values} into {table}
add a row to {table} with {values}
new record in {table}: {values}
put {values} into the table {table}
store {values} in {table}
> row_id int:1:9000

#memo save_memory,remember,store_fact
Store a fact under a key.
@key|name word! Key
@value|content phrase! Value
remember that {key} is "{value}"
store "{value}" under {key}
keep "{value}" as {key}
save the fact {key}: {value}
memorise "{value}" with the key {key}
> status pick:stored

#recall get_memory,recall,load_fact
Recall a stored fact.
@key|name word! Key
& what did I store under {key}?
& recall {key}
& what do you remember about {key}?
& get the fact {key}
& look up {key} in your memory
> value phrase

#vacation request_leave,request_vacation,bookLeave
Request days off.
@start|from_date date! First day as YYYY-MM-DD
@end|to_date date! Last day as YYYY-MM-DD
@reason text Reason
I want to take leave from {start} to {end}
request vacation from {start} until {end}[, reason "{reason}"]
book me off between {start} and {end}
I'll be away from {start} to {end}, file the leave
please put in holidays from {start} to {end}
> request_id id; status pick:pending|approved

#~library search_library,find_book,catalogSearch
Search the library catalogue for a book.
@title|book title! Title of the book
@author|writer person Author
does the library have "{title}"[ by {author}]?
& find the book {title}
look for {title}[ written by {author}] in the catalogue
& I want to borrow {title}, is it there?
search the library for "{title}"[ by {author}]
& can I read {title} somewhere?
? look for a book
> shelf id; copies int:1:9

#~parking find_parking,parking_spots,searchParking
Find parking spaces close to a place.
@place|near|location city! Where
@hours int:1:12 How long in hours
where can I park in {place}[ for {hours} hours]?
& find a parking spot near {place}
I need to leave my car in {place} for {hours} hours
& is there parking around {place}?
show me garages near {place}[, {hours} hours]
? find me a parking spot
>> garage title; price num:1:9

#~doctor book_appointment,doctor_appointment,scheduleVisit
Make an appointment with a doctor.
@doctor|physician person! Doctor
@date|day date! Day as YYYY-MM-DD
@reason|symptom text Reason of the visit
I need to see {doctor} on {date}
make an appointment with {doctor} for {date}[ because of "{reason}"]
book {doctor} on {date}
schedule a visit to {doctor} on {date}[, reason "{reason}"]
can {doctor} take me on {date}?
> appointment_id id

#~air air_quality,get_aqi,airQuality
Air quality index of a city.
@city|location city! City
& how is the air in {city}?
& is the air clean in {city}?
& what's the air quality in {city}?
& check the pollution level in {city}
& can I go running in {city} with this smog?
? how is the air quality?
> index int:1:300; level pick:good|moderate|poor

#~vm start_vm,create_instance,launchVm
Start a virtual machine.
@image|template word! Image
@cpus|cores int:1:32! Number of CPUs
@memory_gb|ram int:1:128 Memory in GB
start a machine from {image} with {cpus} CPUs[ and {memory_gb} GB of memory]
launch a {cpus}-core VM with the image {image}
I need a virtual machine: image {image}, {cpus} cores[, {memory_gb} GB]
spin up {image} on {cpus} cores
boot an instance of {image} with {cpus} CPUs[, {memory_gb} GB memory]
> vm_id id; ip ip

#~backup run_backup,create_backup,backupFolder
Back up a folder.
@source|folder dir! Folder to save
@compress bool Compress it
& back up {source}
& make a backup of {source}
save a compressed copy of {source}|compress=true
& please secure the folder {source}
back up {source} without compression|compress=false
run a backup of {source}[ and compress it|compress=true]
? make a backup
> backup_id id; size_mb int:1:9000

#~plant water_plants,irrigate,startWatering
Water the plants in a zone of the garden.
@zone|area room! Zone
@minutes|duration int:2:60! Minutes
water the {zone} for {minutes} minutes
the plants in the {zone} look dry, give them {minutes} minutes of water
run the sprinkler in the {zone} for {minutes} minutes
irrigate the {zone}, {minutes} minutes
let the water run for {minutes} minutes in the {zone}
> status pick:watering|done

#~loan loan_payment,calc_mortgage,loanCalculator
Monthly payment of a loan.
@principal|amount|loan_amount int:1000:90000! Borrowed sum
@rate|interest_rate num:1:12! Yearly interest in percent
@years|term int:2:35! Years
what do I pay a month for a loan of {principal} at {rate} percent over {years} years?
I borrow {principal} for {years} years at {rate} %, what's the monthly rate?
compute the mortgage for {principal}, {rate} percent, {years} years
monthly payment for {principal} at {rate} percent interest and {years} years
> payment num:10:900

#~subscribe subscribe_newsletter,add_subscriber,newsletterSignup
Subscribe an address to a newsletter.
@email|address email! Mail address
@newsletter|topic label! Which newsletter
sign {email} up for the {newsletter} newsletter
subscribe {email} to {newsletter}
{email} wants the {newsletter} newsletter
add {email} to the {newsletter} mailing
put {email} on the list for {newsletter}
> status pick:subscribed

#~sensor read_sensor,sensor_value,getSensor
Read a sensor of the house.
@sensor|name label! Sensor
& what does the {sensor} sensor show?
& read the {sensor} sensor
& give me the value of the {sensor} sensor
& what's the {sensor} meter at?
? read a sensor
> value num:1:99; unit word

#~workout log_workout,add_training,logExercise
Log a workout.
@activity|exercise activity! Sport
@minutes|duration int:5:180! Minutes
@distance_km|distance num:1:40 Kilometres
I went {activity} for {minutes} minutes, log it
log {minutes} minutes of {activity}[, {distance_km} km]
add a workout: {activity}, {minutes} minutes[, {distance_km} kilometres]
record that I did {minutes} minutes of {activity}
today I did {activity} for {minutes} minutes[ and {distance_km} km]
> calories int:50:1200

#~coupon apply_coupon,redeem_code,useVoucher
Apply a coupon code to an order.
@code|coupon id! Coupon code
@order_id|order id! Order number
use the coupon {code} on order {order_id}
apply {code} to {order_id}
I have a voucher {code} for the order {order_id}
redeem {code} for order {order_id}
take {code} off order {order_id}
> discount int:1:50

#~podcast play_podcast,podcast_play,startPodcast
Play a podcast.
@show|podcast title! Podcast
@episode int:1:300 Episode number
& play the podcast {show}
put on episode {episode} of {show}
I want to listen to {show}, episode {episode}
& start the show {show}
play {show}[, episode {episode}]
? play a podcast
> status pick:playing
"""
