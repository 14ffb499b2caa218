-- ARGV: now, after, count -> number of the last event before these, events...
local K, call = '{skv}:', redis.call
local logged = tonumber(call('HGET', K .. 'm', 'logged') or 0)
local first = logged - call('LLEN', K .. 'log')
local skip = math.max(0, tonumber(ARGV[2]) - first)
local events = call('LRANGE', K .. 'log', skip, skip + tonumber(ARGV[3]) - 1)
local reply = {first + skip}
for i = 1, #events do reply[i + 1] = events[i] end
return reply
