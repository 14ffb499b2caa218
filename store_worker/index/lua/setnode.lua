-- ARGV: now, name, 'drain', 0 or 1; or now, name, 'charge', object bytes, charged bytes
local K, call = '{skv}:', redis.call
local idx = call('HGET', K .. 'nodes', ARGV[2])
if idx then
  if ARGV[3] == 'drain' then
    call('HSET', K .. 'n:' .. idx, 'drain', ARGV[4])
  else
    call('HSET', K .. 'nc:' .. idx, ARGV[4], ARGV[5])
  end
end
return 0
