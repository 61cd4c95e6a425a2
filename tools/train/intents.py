"""CLINC150's intents as tools without parameters: domain|intent|description. One domain gives one tool a prompt."""
INTENTS = """bank|freeze_account|Freeze a bank account
bank|routing|Bank routing number
bank|pin_change|Change the PIN of a card
bank|bill_due|When a bill is due
bank|pay_bill|Pay a bill
bank|account_blocked|Why a bank account is blocked
bank|interest_rate|Interest rate of an account
bank|min_payment|Minimum payment of a bill
bank|bill_balance|Amount of the open bills
bank|transfer|Move money between own accounts
bank|order_checks|Order new checkbooks
bank|balance|Balance of the accounts
bank|spending_history|What money was spent on
bank|transactions|Recent transactions
bank|report_fraud|Report a fraudulent transaction
card|replacement_card_duration|How long a replacement card takes
card|expiration_date|When a card expires
card|damaged_card|Report a damaged card
card|improve_credit_score|How to improve the credit score
card|report_lost_card|Report a lost or stolen card
card|card_declined|Why a card was declined
card|credit_limit_change|Ask for another credit limit
card|apr|Annual percentage rate of a credit card
card|redeem_rewards|Redeem reward points
card|credit_limit|Current credit limit
card|rewards_balance|Reward points earned
card|application_status|Status of a card application
card|credit_score|Current credit score
card|new_card|Apply for a new card
card|international_fees|Fees for using a card abroad
food|recipe|Recipe for a dish
food|restaurant_reviews|Reviews of a restaurant
food|calories|Calories of a food
food|nutrition_info|Nutrition facts of a food
food|restaurant_suggestion|Suggest a restaurant
food|ingredients_list|Ingredients of a dish
food|ingredient_substitution|Substitute for an ingredient
food|cook_time|Cooking time of a dish
food|food_last|How long food keeps
food|meal_suggestion|Suggest a meal
food|restaurant_reservation|Reserve a table
food|confirm_reservation|Confirm a reservation
food|how_busy|How busy a restaurant is
food|cancel_reservation|Cancel a reservation
food|accept_reservations|Whether a restaurant takes reservations
home|shopping_list|What is on the shopping list
home|smart_home|Control a smart home device
home|todo_list|What is on the to-do list
home|next_song|Skip to the next song
home|play_music|Play music
home|what_song|Name the song that is playing
home|order|Order goods
home|order_status|Status of an order
home|reminder|What the reminders are
home|calendar|What is on the calendar
auto|gas_type|Which fuel a car takes
auto|gas|How much fuel is left
auto|oil_change_when|When the next oil change is due
auto|oil_change_how|How to change oil
auto|jump_start|How to jump start a car
auto|uber|Order a ride
auto|schedule_maintenance|Make a car service appointment
auto|last_maintenance|When the car was last serviced
auto|tire_pressure|Tire pressure
auto|tire_change|How to change a tire
auto|mpg|Fuel economy of a car
auto|traffic|Traffic on a route
auto|directions|Directions to a place
auto|distance|Distance and travel time to a place
travel|book_flight|Book a flight
travel|book_hotel|Book a hotel
travel|car_rental|Rent a car
travel|travel_suggestion|What to see at a destination
travel|travel_alert|Travel alerts for a country
travel|travel_notification|Tell the bank about a trip
travel|carry_on|Carry-on rules of an airline
travel|timezone|Time zone of a place
travel|vaccines|Vaccines needed for a trip
travel|translate|Translate a phrase
travel|flight_status|Status of a flight
travel|international_visa|Visa rules of a country
travel|lost_luggage|Report lost luggage
travel|plug_type|Plug type of a country
travel|exchange_rate|Exchange rate
util|flip_coin|Flip a coin
util|roll_dice|Roll dice
util|spelling|How a word is spelled
util|definition|Definition of a word
util|measurement_conversion|Convert units
util|weather|Weather report
util|time|Current time
util|date|Date of today
util|timer|Set a timer
util|alarm|Set an alarm
util|text|Send a text message
util|make_call|Call somebody
util|find_phone|Find a lost phone
util|share_location|Share the location
util|calculator|Do arithmetic
work|pto_request|Request time off
work|pto_balance|Days of leave left
work|pto_used|Days of leave taken
work|payday|When the next pay day is
work|taxes|Tax information
work|income|Income of the user
work|rollover_401k|Roll over a retirement account
work|w2|Get the W-2 form
work|direct_deposit|Set up direct deposit
work|insurance|Insurance benefits
work|insurance_change|Change the insurance plan
work|schedule_meeting|Schedule a meeting
work|meeting_schedule|Which meetings are planned
work|next_holiday|Next public holiday""".split("\n")

# SNIPS: slots that a tool may expose, as slot -> parameter names
SNIPS = {
    "AddToPlaylist": (["add_to_playlist", "playlist_add", "addToPlaylist"], "Add music to a playlist",
                      {"playlist": ["playlist", "playlist_name", "list"], "entity_name": ["title", "track", "item"], "artist": ["artist", "musician"]}),
    "BookRestaurant": (["book_restaurant", "reserve_restaurant", "restaurantBooking"], "Book a restaurant",
                       {"restaurant_name": ["restaurant", "name"], "party_size_number": ["people", "party_size", "guests"], "city": ["city", "town"], "state": ["state", "region"], "country": ["country"], "timeRange": ["time", "when"], "cuisine": ["cuisine", "food"], "served_dish": ["dish", "meal"]}),
    "GetWeather": (["get_weather", "weather_report", "getForecast"], "Weather report or forecast",
                   {"city": ["city", "location", "place"], "state": ["state", "region"], "country": ["country"], "timeRange": ["time", "when", "date"]}),
    "PlayMusic": (["play_music", "music_play", "playSong"], "Play music",
                  {"artist": ["artist", "musician"], "track": ["track", "song"], "album": ["album", "record"], "playlist": ["playlist"], "service": ["service", "provider"], "genre": ["genre", "style"]}),
    "RateBook": (["rate_book", "book_rating", "rateBook"], "Rate a book",
                 {"object_name": ["title", "book"], "rating_value": ["rating", "stars", "value"], "best_rating": ["best", "out_of"]}),
    "SearchCreativeWork": (["search_work", "find_work", "searchMedia"], "Search for a book, film, song, game or show",
                           {"object_name": ["title", "name", "query"]}),
    "SearchScreeningEvent": (["movie_times", "find_screening", "screenings"], "Find showtimes of films",
                             {"movie_name": ["movie", "film", "title"], "location_name": ["cinema", "theater"], "timeRange": ["time", "when"]}),
}
