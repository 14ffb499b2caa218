-- ARGV: now, incarnation, secret, format. Makes the index if there is none.
local K, call = '{skv}:', redis.call
if call('HSETNX', K .. 'm', 'inc', ARGV[2]) == 1 then
  local t = call('TIME')
  call('HSET', K .. 'm', 'sec', ARGV[3], 'fmt', ARGV[4],
    'gen', string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000)))
end
return call('HMGET', K .. 'm', 'inc', 'sec', 'fmt')
