-- ARGV: now, cursor, count; or now, -1, session
-- -> clock, next cursor, then per session: key, generation, home, depth, tokens, turns, last use,
--    pinned until, priority, its end, engines
local reply = {call('HGET', K .. 'm', 'clock') or 0, 0}
local function add(key)
  local s = session_of(key)
  if not s then return end
  local depth, tokens, home = 0, 0, ''
  for _, id in ipairs(call('ZREVRANGE', K .. 'sh:' .. key, 0, C_HOLDS_SHOWN - 1)) do
    local r = run_of(id)
    local at = min(tonumber(call('ZSCORE', K .. 'h:' .. id, key) or 0), r.stop)
    local per = string.match(call('HGET', K .. 'ds', r.ns) or '0 ', '^%d+')
    depth, tokens = max(depth, at), max(tokens, at * per)
  end
  if s.home ~= 0 then home = node_at(s.home).name end
  for _, v in ipairs({key, s.gen, home, depth, tokens, s.turns, s.last, s.pin, s.prio + 8,
    s.puntil, s.engines}) do reply[#reply + 1] = v end
end
if ARGV[2] == '-1' then
  add(ARGV[3])
else
  local keys = call('ZRANGEBYSCORE', K .. 'sq', tonumber(ARGV[2]) + 1, '+inf', 'LIMIT', 0, ARGV[3])
  for _, key in ipairs(keys) do add(key) end
  if #keys == tonumber(ARGV[3]) and #keys > 0 then
    reply[2] = tonumber(call('ZSCORE', K .. 'sq', keys[#keys]))
  end
end
return reply
