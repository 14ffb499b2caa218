-- ARGV: now, namespace, hashes... -> one digit per hash
local got = redis.call('HMGET', '{skv}:e:' .. ARGV[2], unpack(ARGV, 3))
for i = 1, #ARGV - 2 do got[i] = got[i] and '1' or '0' end
return table.concat(got)
