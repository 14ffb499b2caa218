-- ARGV: now -> per node: name, incarnation, up, draining, and seven sizes
local K, call = '{skv}:', redis.call
local reply = {}
for idx = 1, tonumber(call('HGET', K .. 'm', 'nodes') or 0) do
  reply[idx] = call('HMGET', K .. 'n:' .. idx, 'name', 'inc', 'up', 'drain', 'cap', 'stored',
    'copies', 'granted', 'dying', 'blocks')
end
return reply
