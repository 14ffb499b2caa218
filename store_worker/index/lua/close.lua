-- ARGV: now, session, resume -> blocks, more, victims
call('DEL', K .. 'none')
begin()
local key, blocks = ARGV[2], 0
if ARGV[3] == '0' then
  local s = session_of(key)
  M.gen = max(M.gen, s and s.gen or 0) + 1
  s = s or open_session(key, 0, '')
  uncount(s)
  s.gen, s.closed, s.home, s.turns, s.prio, s.puntil = M.gen, 1, 0, 0, 0, 0
  s.last, s.engines, s.dirty = now, '', true
  call('DEL', K .. 'sb:' .. key)
  count('closed')
  local held = call('ZREVRANGE', K .. 'sh:' .. key, 0, -1)
  for i = 1, min(#held, C_ENDED_PER_CLOSE) do
    local r = run_of(held[i])
    end_conversation(r, held_at(r, key))
  end
  for _, id in ipairs(held) do call('ZREM', K .. 'h:' .. id, key) end
  call('DEL', K .. 'sh:' .. key)
  s.holds, s.nholds = {}, 0
  budget = budget - C_RUN_COST * max(0, #held - 1)
  call('ZADD', K .. 'si', now, key)
  for _, id in ipairs(held) do
    -- an earlier one may have taken this one along
    if not (R[id] and R[id].gone) then blocks = blocks + free_up(run_of(id)) end
  end
end
blocks = blocks + sweep_free()
count('closed_blocks', blocks)
return done({blocks, free_left()})
