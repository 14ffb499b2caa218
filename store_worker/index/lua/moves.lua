-- ARGV: now, node -> number of steps, five values each, then victims
begin()
local steps = {}
local source = node_named(ARGV[2])

-- where a run goes: on to where a part of it is, else to the node that is least used
local function target_of(r)
  local best, rank
  for idx = 1, M.nodes do
    local node = node_at(idx)
    if node.up == 1 and node.drain == 0 and node.cap > 0 then
      local begun = 1
      for _, c in ipairs(copies_of(r)) do
        if c[1] == idx and c[2] == node.epoch then begun = 0 end
      end
      local price = {begun, used(node) / node.cap}
      if not best or less(price, rank) then best, rank = node, price end
    end
  end
  return best
end

if source and source.drain == 1 and source.up == 1 then
  local list = K .. 'pr:' .. source.place
  for _, id in ipairs(call('ZRANGE', list, 0, C_MOVE_RUNS_PER_CALL - 1)) do
    local r = run_of(id)
    local target = target_of(r)
    if target and #steps < C_COPY_BLOCKS_PER_CALL then
      copy_to(steps, r, r.stop, target, nil, nil, false)
      -- another one first next time
      call('ZADD', list, now, id)
    end
  end
end
local reply = {#steps}
for _, c in ipairs(steps) do for i = 1, 5 do reply[#reply + 1] = c[i] end end
return done(reply)
