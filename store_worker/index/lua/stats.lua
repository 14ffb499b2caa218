-- ARGV: now -> name, value, ...
local K, call = '{skv}:', redis.call
local reply = call('HGETALL', K .. 'ct')
local function add(name, value)
  reply[#reply + 1] = name
  reply[#reply + 1] = tonumber(value or 0)
end
local sessions, leases, runs, blocks = call('ZCARD', K .. 'sq'), 0, call('ZCARD', K .. 'pr:0:0'), 0
leases = call('ZCARD', K .. 'l:0:0:-1:0')
local places = {}
for idx = 1, tonumber(call('HGET', K .. 'm', 'nodes') or 0) do
  places[idx .. ':' .. call('HGET', K .. 'n:' .. idx, 'epoch')] = true
end
for _, member in ipairs(call('ZRANGE', K .. 'dead', 0, -1)) do
  local idx, epoch = tonumber(string.sub(member, 1, 4)), tonumber(string.sub(member, 6))
  if idx > 0 then places[idx .. ':' .. epoch] = true end
end
for place in pairs(places) do
  runs = runs + call('ZCARD', K .. 'pr:' .. place)
  leases = leases + call('ZCARD', K .. 'l:' .. place .. ':-1:0')
end
for _, ns in ipairs(call('SMEMBERS', K .. 'nss')) do blocks = blocks + call('HLEN', K .. 'e:' .. ns) end
add('sessions', sessions)
add('open_sessions', sessions - call('ZCARD', K .. 'si'))
add('leases', leases)
add('runs', runs)
add('blocks', blocks)
add('grants', call('HGET', K .. 'm', 'running'))
return reply
