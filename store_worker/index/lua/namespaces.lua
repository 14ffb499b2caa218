-- ARGV: now -> namespace, description, blocks, ...
local K, call = '{skv}:', redis.call
local about, reply = {}, {}
for _, ns in ipairs(call('SMEMBERS', K .. 'nss')) do about[ns] = '0 ' end
local described = call('HGETALL', K .. 'ds')
for i = 1, #described, 2 do about[described[i]] = described[i + 1] end
for ns, text in pairs(about) do
  reply[#reply + 1] = ns
  reply[#reply + 1] = text
  reply[#reply + 1] = call('HLEN', K .. 'e:' .. ns)
end
return reply
