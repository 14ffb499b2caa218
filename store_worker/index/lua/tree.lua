-- The chains' tree, as in tree.py.
local budget = C_REMOVED_MAX

-- {run, depth} from the tip to the root; nil if the way is too long
local function walk(r, depth)
  local path = {{r, depth}}
  while r.parent ~= '' do
    if #path >= C_WALK_RUNS_MAX then return nil end
    r, depth = find(r.ns, r.parent)
    path[#path + 1] = {r, depth}
  end
  return path
end

-- how deep the run can be loaded; its start if not at all
local function live_stop(r)
  if reachable(r.node, r.epoch) then return r.stop end
  local best = r.start
  for _, c in ipairs(copies_of(r)) do
    if c[3] > best and reachable(c[1], c[2]) then best = c[3] end
  end
  return best
end

local function lies_on(r, depth, node)
  if r.node == node.idx and r.epoch == node.epoch then return true end
  for _, c in ipairs(copies_of(r)) do
    if c[1] == node.idx and c[2] == node.epoch and c[3] >= depth then return true end
  end
  return false
end

-- uses and leases -----------------------------------------------------------------------------
local function by_depth(a, b) return a[1] < b[1] end

local function add_mark(r, depth, at, cls)
  local kept = {}
  for _, m in ipairs(marks_of(r)) do
    if m[1] >= depth and m[2] >= at then
      if m[1] > depth or m[2] > at then return end
    elseif m[1] > depth or m[2] > at then
      kept[#kept + 1] = m
    end
  end
  kept[#kept + 1] = {depth, at, cls}
  table.sort(kept, by_depth)
  r.marks, r.dirty = kept, true
end

local function mark_at(r, depth)
  local marks = marks_of(r)
  for _, m in ipairs(marks) do if m[1] >= depth then return m end end
  return marks[#marks]
end

local function add_lease(r, depth, till)
  local kept, covered = {}, false
  for _, m in ipairs(leases_of(r)) do
    if m[2] > now then
      kept[#kept + 1] = m
      if m[1] >= depth and m[2] >= till then covered = true end
    end
  end
  if not covered then
    local rest = {{depth, till, 0}}
    for _, m in ipairs(kept) do
      if m[1] > depth or m[2] > till then rest[#rest + 1] = m end
    end
    kept = rest
  end
  table.sort(kept, by_depth)
  r.leases, r.dirty = kept, true
end

local function leased_to(r)
  local top = r.start
  for _, m in ipairs(leases_of(r)) do
    if m[2] > now and m[1] > top then top = m[1] end
  end
  return top
end

-- the lists of leaves -------------------------------------------------------------------------
-- ends of lists, as far as they are known; LISTS: names of a place's lists that are not empty
local ENDS, LISTS = {}, {}

local function place_of(r) return r.node .. ':' .. r.epoch end

local function list_key(place, where) return K .. 'l:' .. place .. ':' .. where end

local function unlist(r)
  if r.where then
    local place = place_of(r)
    local list = list_key(place, r.where)
    call('ZREM', list, r.id)
    ENDS[list] = nil
    if call('EXISTS', list) == 0 then
      call('SREM', K .. 'lc:' .. place, r.where)
      if LISTS[place] then LISTS[place][r.where] = nil end
    end
    r.where, r.dirty = false, true
  end
end

-- level that the leaf's holders give it, and when that may change (0: never)
local function level_of(r)
  local level, timer = 0, 0
  for _, key in ipairs(call('ZRANGEBYSCORE', K .. 'h:' .. r.id, r.stop, '+inf')) do
    local s = session_of(key)
    if not s then
      level = max(level, C_LEVEL_NORMAL)
    else
      local own = C_LEVEL_NORMAL
      if s.prio ~= 0 and s.puntil > now then
        own = own + s.prio
        timer = timer == 0 and s.puntil or min(timer, s.puntil)
      end
      if s.pin > now then
        own = C_LEVEL_PINNED
        timer = timer == 0 and s.pin or min(timer, s.pin)
      end
      level = max(level, own)
    end
  end
  return level == 0 and C_LEVEL_NORMAL or level, timer
end

local function class_of(times, tokens)
  local text = call('HMGET', K .. 'tb', 'times', 'tokens')
  if not text[1] then text = {C_TIMES, C_TOKENS} end
  local parts = {}
  for i, value in ipairs({times, tokens}) do
    local k, n = 0, 0
    for edge in string.gmatch(text[i], '%d+') do
      n = n + 1
      if tonumber(edge) <= value then k = n end
    end
    parts[i], parts[i + 2] = max(0, k - 1), n
  end
  return parts[1] * parts[4] + parts[2]
end

-- depth of the deepest shared part that ends in the run (0: none)
local function shared_depth(r)
  local depth = 0
  for _, d in ipairs(shared_of(r)) do depth = max(depth, d) end
  return depth
end

-- list where the run belongs (nil: none), its score there, when to look again
local function belongs(r)
  if top_child(r) >= r.stop then return nil, 0, 0 end
  local till = 0
  for _, m in ipairs(leases_of(r)) do
    if m[1] >= r.stop then till = max(till, m[2]) end
  end
  if till > now then return C_BUSY, till, 0 end
  local marks = marks_of(r)
  local mark = marks[#marks]
  if r.free and top_holder(r) >= r.stop then r.free, r.dirty = false, true end
  if r.free then return C_LEVEL_FREE .. ':0', mark[2], 0 end
  local level, timer = level_of(r)
  local cls = mark[3]
  if r.stop <= shared_depth(r) then cls = class_of(C_TIMES_SHARED, 0) end
  if level == C_LEVEL_PINNED then cls = 0 end
  return level .. ':' .. fmt('%d', cls), mark[2], timer
end

local function settle(r)
  local target, score, timer = belongs(r)
  local place = place_of(r)
  if r.where and r.where ~= target then unlist(r) end
  if target then
    local list = list_key(place, target)
    call('ZADD', list, score, r.id)
    ENDS[list] = nil
    if r.where ~= target then
      call('SADD', K .. 'lc:' .. place, target)
      if LISTS[place] then LISTS[place][target] = true end
      r.where, r.dirty = target, true
    end
  end
  if timer > 0 then
    call('ZADD', K .. 'tm:' .. place, timer, r.id)
    if not r.timer then r.timer, r.dirty = true, true end
  elseif r.timer then
    call('ZREM', K .. 'tm:' .. place, r.id)
    r.timer, r.dirty = false, true
  end
end

local function leave(r)
  unlist(r)
  local place = place_of(r)
  if r.timer then
    call('ZREM', K .. 'tm:' .. place, r.id)
    r.timer = false
  end
  call('ZREM', K .. 'pr:' .. place, r.id)
  r.dirty = true
end

local function wake(node)
  local due = call('ZRANGEBYSCORE', list_key(node.place, C_BUSY), '-inf', now,
    'LIMIT', 0, C_WAKE_PER_CALL)
  for _, id in ipairs(call('ZRANGEBYSCORE', K .. 'tm:' .. node.place, '-inf', now,
    'LIMIT', 0, C_WAKE_PER_CALL)) do due[#due + 1] = id end
  for _, id in ipairs(due) do settle(run_of(id)) end
end

-- how many of the last blocks may go: one that a running grant has promised to the same node may
-- have been written by it as well, and stays for a little
local function unpromised(r, blocks)
  if blocks == 0 then return 0 end
  local nodes = {current(r.node, r.epoch)}
  for _, c in ipairs(copies_of(r)) do nodes[#nodes + 1] = current(c[1], c[2]) end
  local b, size = hashes_of(r)
  local keys = {}
  for i = 1, blocks do
    local at = (r.stop - r.start - i) * size
    keys[i] = r.ns .. sub(b, at + 1, at + size)
  end
  local free = blocks
  for _, node in ipairs(nodes) do
    local key = K .. 'gh:' .. node.place
    if call('EXISTS', key) == 1 then
      local promised = call('HMGET', key, unpack(keys))
      for i = 1, free do
        if promised[i] then free = i - 1 break end
      end
    end
  end
  if free < blocks then
    add_lease(r, r.stop - free, now + C_PROMISE_MS)
    settle(r)
  end
  return free
end

-- removal -------------------------------------------------------------------------------------
local function uncopied(c, id) call('ZREM', K .. 'cp:' .. c[1] .. ':' .. c[2], id) end

local function cap_copies(r)
  local kept = {}
  for _, c in ipairs(copies_of(r)) do
    local upto = min(c[3], r.stop)
    if upto > r.start then kept[#kept + 1] = {c[1], c[2], upto} else uncopied(c, r.id) end
  end
  r.copies = kept
end

local function set_idle(s)
  holds_of(s)
  if s.nholds == 0 then call('ZADD', K .. 'si', s.last, s.key) end
end

local function rehold(key, r, parent)
  local s = session_of(key)
  local since = s and holds_of(s)[r.id] or 0
  if s then cut_hold(s, r.id) end
  if parent then
    call('ZADD', K .. 'h:' .. parent.id, r.start, key)
    if s then put_hold(s, parent.id, max(since, holds_of(s)[parent.id] or 0)) end
  elseif s then
    set_idle(s)
  end
end

local function drop(r, mark)
  leave(r)
  r.gone = true
  local parent
  if r.parent ~= '' then parent = find(r.ns, r.parent) end
  local bare = false
  if parent then
    drop_child(parent, r.id)
    if mark then add_mark(parent, r.start, mark[2], mark[3]) end
    bare = parent.stop == r.start and top_child(parent) < r.start
  end
  for _, key in ipairs(call('ZRANGE', K .. 'h:' .. r.id, 0, -1)) do
    local keep = bare and parent or nil
    if keep then
      local at = call('ZSCORE', K .. 'h:' .. parent.id, key)
      if at and tonumber(at) >= r.start then keep = nil end
    end
    rehold(key, r, keep)
  end
  if parent then
    if r.free and parent.stop == r.start and unwanted(parent, parent.stop) then
      parent.free = true
    end
    parent.dirty = true
    settle(parent)
  end
end

-- takes the blocks (stop, r.stop] out of the index, the deepest first
local function trim(r, stop)
  local cut
  for _, m in ipairs(marks_of(r)) do
    if m[1] > stop then cut = m break end
  end
  if cut and stop < shared_depth(r) then cut = {cut[1], cut[2], class_of(C_TIMES_SHARED, 0)} end
  local home = current(r.node, r.epoch)
  local copies = {}
  for _, c in ipairs(copies_of(r)) do
    local node = current(c[1], c[2])
    if node then copies[#copies + 1] = {node, c[3]} end
  end
  local b, size = hashes_of(r)
  local gone = {}
  for depth = r.stop, stop + 1, -1 do
    local block = sub(b, (depth - r.start - 1) * size + 1, (depth - r.start) * size)
    gone[#gone + 1] = block
    if home then bury(home, r.ns, block, r.bb, r.ranks) end
    for _, c in ipairs(copies) do
      if c[2] >= depth then
        c[1].copies = c[1].copies - r.bb
        bury(c[1], r.ns, block, r.bb, r.ranks)
      end
    end
  end
  each('HDEL', K .. 'e:' .. r.ns, gone)
  if home then
    home.stored = home.stored - #gone * r.bb
    home.blocks = home.blocks - #gone
    home.dirty = true
  end
  budget = budget - (#gone + C_RUN_COST)
  r.b, r.newb = sub(b, 1, (stop - r.start) * size), true
  r.stop, r.dirty = stop, true
  if #r.copies > 0 then cap_copies(r) end
  local leases, shared, marks = {}, {}, {}
  for _, m in ipairs(leases_of(r)) do if m[1] <= stop then leases[#leases + 1] = m end end
  for _, d in ipairs(shared_of(r)) do if d <= stop then shared[#shared + 1] = d end end
  r.leases, r.shared = leases, shared
  if stop == r.start then return drop(r, cut) end
  for _, m in ipairs(r.marks) do if m[1] <= stop then marks[#marks + 1] = m end end
  r.marks = marks
  if cut then add_mark(r, stop, cut[2], cut[3]) end
  settle(r)
end

-- splits --------------------------------------------------------------------------------------
local function parted(list, at)
  local upper, lower = {}, {}
  for _, m in ipairs(list) do
    local part = m[1] <= at and upper or lower
    part[#part + 1] = m
  end
  return upper, lower
end

local function share_copies(upper, lower, copies, at)
  upper.copies, lower.copies = {}, {}
  for _, c in ipairs(copies) do
    if current(c[1], c[2]) then
      upper.copies[#upper.copies + 1] = {c[1], c[2], min(c[3], at)}
      if c[3] > at then lower.copies[#lower.copies + 1] = c end
      local list = K .. 'cp:' .. c[1] .. ':' .. c[2]
      local since = max(tonumber(call('ZSCORE', list, upper.id) or 0),
        tonumber(call('ZSCORE', list, lower.id) or 0))
      call('ZADD', list, since, upper.id)
      if c[3] > at then call('ZADD', list, since, lower.id) else call('ZREM', list, lower.id) end
    end
  end
end

-- gives `other` what hangs on its blocks
local function share_out(r, other, at)
  local upper = other.stop == at
  local low, high = upper and '-inf' or at + 1, upper and at or '+inf'
  local childhigh = upper and at + 0.5 or '+inf'
  local moved = call('ZRANGEBYSCORE', K .. 'k:' .. r.id, low, childhigh, 'WITHSCORES')
  if #moved > 0 then
    local list = {}
    for i = 1, #moved, 2 do list[i], list[i + 1] = moved[i + 1], moved[i] end
    each('ZADD', K .. 'k:' .. other.id, list)
    call('ZREMRANGEBYSCORE', K .. 'k:' .. r.id, low, childhigh)
  end
  moved = call('ZRANGEBYSCORE', K .. 'h:' .. r.id, low, high, 'WITHSCORES')
  for i = 1, #moved, 2 do
    call('ZADD', K .. 'h:' .. other.id, moved[i + 1], moved[i])
    call('ZREM', K .. 'h:' .. r.id, moved[i])
    local s = session_of(moved[i])
    if s then
      put_hold(s, other.id, holds_of(s)[r.id] or 0)
      cut_hold(s, r.id)
    end
  end
  r.top, other.top = nil, nil
  local up, low2 = r, other
  if upper then up, low2 = other, r end
  local copies, shared = copies_of(r), shared_of(r)
  up.marks, low2.marks = parted(marks_of(r), at)
  up.leases, low2.leases = parted(leases_of(r), at)
  up.shared, low2.shared = {}, {}
  for _, d in ipairs(shared) do
    local part = d <= at and up.shared or low2.shared
    part[#part + 1] = d
  end
  share_copies(up, low2, copies, at)
end

-- cuts a run in two; upper and lower part
local function split(r, at)
  local key = K .. 'k:' .. r.id
  local above = call('ZCOUNT', key, '-inf', at + 0.5)
  local lower_moves = call('ZCARD', key) - above <= above
  local b, size = hashes_of(r)
  local k = at - r.start
  M.run = M.run + 1
  local other = {
    id = id12(M.run), ns = r.ns, parent = r.parent, start = r.start, stop = at, node = r.node,
    epoch = r.epoch, ranks = r.ranks, bb = r.bb, free = r.free, where = false, timer = false,
    dirty = true, newb = true
  }
  R[other.id] = other
  local pr = K .. 'pr:' .. place_of(r)
  call('ZADD', pr, call('ZSCORE', pr, r.id), other.id)
  local link = sub(b, (k - 1) * size + 1, k * size)
  local upper, lower
  if lower_moves then
    other.parent, other.start, other.stop, other.b = link, at, r.stop, sub(b, k * size + 1)
    r.stop, r.b = at, sub(b, 1, k * size)
    upper, lower = r, other
  else
    local parent
    if r.parent ~= '' then parent = find(r.ns, r.parent) end
    if parent then
      drop_child(parent, r.id)
      add_child(parent, other.id, r.start)
    end
    other.b = sub(b, 1, k * size)
    r.parent, r.start, r.b = link, at, sub(b, k * size + 1)
    upper, lower = other, r
  end
  r.newb, r.dirty = true, true
  local entries = {}
  for depth = other.start + 1, other.stop do
    local i = depth - other.start
    entries[#entries + 1] = sub(other.b, (i - 1) * size + 1, i * size)
    entries[#entries + 1] = other.id .. depth
  end
  each('HSET', K .. 'e:' .. r.ns, entries)
  share_out(r, other, at)
  add_child(upper, lower.id, at)
  settle(upper)
  settle(lower)
  return upper, lower
end
