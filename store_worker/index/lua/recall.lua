-- ARGV: now, namespace, session -> generation, home or '', boundaries as stored
local K, call = '{skv}:', redis.call
local got = call('HMGET', K .. 's:' .. ARGV[3], 'gen', 'home')
if not got[1] then
  return {call('HGET', K .. 'm', 'gen') or '0', '', ''}
end
local home = ''
if got[2] ~= '0' then home = call('HGET', K .. 'n:' .. got[2], 'name') end
return {got[1], home, call('HGET', K .. 'sb:' .. ARGV[3], ARGV[2]) or ''}
