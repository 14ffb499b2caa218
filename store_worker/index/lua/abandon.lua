-- ARGV: now, namespace, tip
begin()
call('ZADD', K .. 'ab', now, ARGV[2] .. ARGV[3])
if call('ZCARD', K .. 'ab') > C_ABANDONED_MAX then call('ZREMRANGEBYRANK', K .. 'ab', 0, 0) end
return done({})
