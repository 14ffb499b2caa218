-- ARGV: now, number of classes, times, tokens, edges, version, serial, scores
-- -> 0, or the number of classes in force if blocks are listed under another number
local K, call = '{skv}:', redis.call
local classes = tonumber(call('HGET', K .. 'm', 'tcls') or 0)
if classes == 0 then classes = C_CLASSES end
if classes ~= tonumber(ARGV[2]) then
  for _, ns in ipairs(call('SMEMBERS', K .. 'nss')) do
    if call('EXISTS', K .. 'e:' .. ns) == 1 then return classes end
  end
end
call('HSET', K .. 'tb', 'times', ARGV[3], 'tokens', ARGV[4], 'edges', ARGV[5],
  'version', ARGV[6], 'serial', ARGV[7])
call('SET', K .. 'ts', ARGV[8])
call('HSET', K .. 'm', 'tcls', ARGV[2])
return 0
