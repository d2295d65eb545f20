-- Slurm's cli_filter.lua with slurmdl: plain `sbatch --dl-...` gets the choice of nodes that `slurmdl sbatch` makes.
-- In the directory of slurm.conf on the login nodes, with CliFilterPlugins=lua, beside the plugin (spank/README.md),
-- which reads the options. A site with a cli_filter.lua of its own has it call slurmdl_pre_submit and
-- slurmdl_post_submit.
--
-- It runs in the user's sbatch, with the user's rights, and says what `slurmdl sbatch` would say. An option that is
-- wrong refuses the job, as there; whatever else goes wrong, the job is submitted as it was written, and only
-- --dl-strict makes that an error. No word of a user is read by the shell: each is quoted.

local SLURMDL = "slurmdl" -- or its path, which then counts for users whose PATH has another one, too
local SECONDS = "2"       -- how long a choice may take

local function words(text)
	local found = {}
	for word in text:gmatch("%S+") do found[word] = true end
	return found
end

-- sbatch(1): options without a value, and those that can do without
local FLAGS = words [[
	consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit oversubscribe parsable
	quiet reboot spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait
]]
local OPTIONAL = words "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
-- no matter to a choice of nodes; after --quiet slurmdl would not know the job's number, here it is told
local PASSED_OVER = words [[
	chdir comment error export-file help input job-name mail-type mail-user output parsable quiet test-only usage
	verbose version wait wckey wrap
]]
-- what a choice may set, and what of it is taken back from a job that does not start with it
local BINDING = words "prefer nodelist constraint switches exclude"
local RELEASES = words "Prefer ReqNodeList"

local release -- what is taken back from this submission

local function quote(word)
	return "'" .. word:gsub("'", "'\\''") .. "'"
end

local function tell(line)
	io.stderr:write("slurmdl: ", line, "\n")
end

local function contents(name)
	local file = io.open(name)
	local text = file and file:read("*a")
	if file then file:close() end
	return text
end

local function process()
	return tonumber((contents("/proc/self/stat") or ""):match("^%d+")) or 0
end

-- What a command says within its time, "" where it says nothing.
local function ask(seconds, command)
	local pipe = io.popen("exec timeout -k 1 " .. seconds .. " " .. command .. " </dev/null 2>/dev/null")
	local text = pipe and pipe:read(1000000)
	if pipe then pipe:close() end
	return text or ""
end

-- What slurmdl answers within its time: its stdout, its own line on stderr without "slurmdl: " (nil where it wrote
-- none), and its exit status (nil where it was not heard to its end).
local function consult(line)
	local pipe = io.popen("timeout -k 1 " .. SECONDS .. " " .. line .. " </dev/null 2>&1; printf '\\nstatus %d' $?")
	local text = pipe and pipe:read(1000000) or ""
	if pipe then pipe:close() end
	local said, status = text:match("^(.*)\nstatus (%d+)$")
	local own
	local out = (said or ""):gsub("[^\n]+", function(each)
		own = each:match("^slurmdl: (.*)$") or own
		return each:find("^slurmdl: ") and "" or each
	end)
	return out, own and own:gsub("%c", " "):sub(1, 4000), tonumber(status)
end

-- The end of a JSON string that begins at `at`, nil where there is none.
local function skip(text, at)
	if text:sub(at, at) ~= '"' then return nil end
	local quoted = text:find('["\\]', at + 1)
	while quoted and text:sub(quoted, quoted) == "\\" do
		quoted = text:find('["\\]', quoted + 2)
	end
	return quoted
end

-- Names of the options that are given, as one JSON object of strings and lists of strings tells them; nil where it is
-- anything else: who does not know all that is asked for makes no choice.
local function given(json)
	local names, at = {}, json:find("{", 1, true)
	while at do
		local _, last, name = json:find('^[{,]%s*"([%w:_-]+)"%s*:%s*', at)
		if not last then return json:find("^[{,]?%s*}%s*$", at) and names end
		names[#names + 1] = name
		at = last + 1
		if json:sub(at, at) == "[" then
			local item = json:match("^%[%s*()", at)
			while json:sub(item, item) == '"' do
				item = skip(json, item)
				item = item and json:match("^%s*,?%s*()", item + 1)
				if not item then return nil end
			end
			if json:sub(item, item) ~= "]" then return nil end
			at = item
		else
			at = skip(json, at)
		end
		at = at and json:match("^%s*()", at + 1)
	end
	return nil
end

-- The command line for slurmdl: the options that sbatch has after script, environment and command line. The --dl-*
-- options are in the environment, where the plugin puts them for the job.
local function question(options)
	local names = given(slurm.json_cli_options(options) or "")
	if not names then return nil end
	-- those who submit at once should not all get the same of equal nodes
	local seed = 1 + (os.time() * 7919 + process() * 104729) % 4294967295
	local line = {quote(SLURMDL), "place", "--json", "--wrap=:", string.format("--seed=%.0f", seed)}
	for _, name in ipairs(names) do
		if not (PASSED_OVER[name] or name == "argv" or name:find("^spank:")) then
			local value = options[name]
			if FLAGS[name] or (OPTIONAL[name] and (value == name or value == "set")) then
				line[#line + 1] = quote("--" .. name)
			elseif type(value) == "string" then
				line[#line + 1] = quote("--" .. name .. "=" .. value)
			else
				return nil
			end
		end
	end
	return table.concat(line, " ")
end

-- The text of a member of an answer, "" where it has none.
local function member(answer, name)
	local begin = answer:match('.*"' .. name .. '"%s*:%s*()"')
	local last = begin and skip(answer, begin)
	local text = last and answer:sub(begin + 1, last - 1) or ""
	return (text:gsub("\\u%x%x%x%x", "?"):gsub("\\(.)", "%1"):gsub("%c", " "):sub(1, 4000))
end

-- The binding in an answer, as {name, value} each, what is taken back, and what users are told; nil and why where it
-- is not understood.
local function read(answer)
	local list = answer:find("^%s*{.*}%s*$") and answer:match('"binding"%s*:%s*(%b[])')
	if not list then return nil, "no answer from slurmdl" end
	local found = {}
	local rest = list:sub(2, -2):gsub('"%-%-(%l+)=([%w%.,_|&:=+%[%]-]+)"', function(name, value)
		found[#found + 1] = BINDING[name] and {name, value}
		return BINDING[name] and "" or "?"
	end)
	if rest:find("[^%s,]") then return nil, "what slurmdl chose cannot be told to sbatch" end
	local taken = member(answer, "releases")
	return found, RELEASES[taken] and taken, member(answer, "line")
end

-- Heterogeneous jobs are never bound. The components come one by one, so that the first does not know of others: a
-- word `:` tells of them, or a line in the script, where that is a file that can be read again.
local function heterogeneous()
	local files = {}
	for word in (contents("/proc/self/cmdline") or ""):gmatch("%Z+") do
		if word == ":" then return true end
		files[#files + 1] = quote(word)
	end
	files[#files + 1] = string.format("/proc/%d/fd/0", process())
	return ask("1", "grep -lsE -D skip -d skip -e '^#SBATCH[[:space:]]+(hetjob|packjob)' -- " ..
		table.concat(files, " ")) ~= ""
end

-- The --dl-* options that are given, nil where there are none, or where the choice is not ours to make.
local function asked(options, offset)
	local dl = type(options.spank) == "table" and options.spank.slurmdl
	-- `slurmdl sbatch` has made a choice, and a job inside of another is submitted as it is written
	if options.type ~= "sbatch" or type(dl) ~= "table" or os.getenv("SLURMDL_SUBMISSION") or os.getenv("SLURM_JOB_ID") then
		return nil
	end
	local any = false
	for _, value in pairs(dl) do any = any or value ~= "unset" end
	local off = dl["dl-node-binding"] == "off" and (dl["dl-zone"] or "unset") == "unset"
	if not any or off or offset ~= 0 or heterogeneous() then return nil end
	return dl
end

-- Whether the job may be submitted, and what users are told, "" for nothing.
local function decide(options, dl, strict)
	local line, why = question(options), "what is asked for cannot be told to slurmdl"
	if line then
		local answer, own, status = consult(line)
		if status == 64 and own then return false, own end
		local binding, taken, told
		if status == 0 then
			if own then tell(own) end -- a remark, as on scores that cannot be read
			binding, taken, told = read(answer)
			why = taken
		else
			why = own or "no answer from slurmdl" .. (status == 124 and " within " .. SECONDS .. " s" or "")
		end
		if binding then
			for _, option in ipairs(binding) do options[option[1]] = option[2] end
			release = taken
			return true, told
		end
	end
	if strict then return false, why end
	local zone = dl["dl-zone"] or "unset"
	if zone ~= "unset" then why = "--dl-zone=" .. zone .. " is not applied: " .. why end
	return true, "submitted as written: " .. why
end

function slurmdl_pre_submit(options, offset)
	local strict = false
	local fine, submits, line = pcall(function()
		release = nil
		local dl = asked(options, offset)
		if not dl then return true, "" end
		strict = (dl["dl-strict"] or "unset") ~= "unset"
		return decide(options, dl, strict)
	end)
	if not fine then
		submits, line = not strict, (strict and "" or "submitted as written: ") .. "internal error: " .. tostring(submits)
	end
	if line ~= "" then tell(line) end
	return submits and slurm.SUCCESS or slurm.ERROR
end

-- A choice never costs a start. The controller has tried the job against its nodes by now: one that is pending for a
-- reason lost them to another, and one without starts at the scheduler's next pass, within 4 s.
function slurmdl_post_submit(job)
	if not release then return end
	pcall(function()
		local update = string.format("timeout 5 scontrol update JobId=%d %s=", job, release)
		local record = ask("1", string.format("scontrol -o show job %d", job))
		if record == "" or record:find("JobState=PENDING Reason=None", 1, true) then
			os.execute("setsid sh -c 'sleep 4; " .. update .. "' </dev/null >/dev/null 2>&1 &")
		elseif record:find("JobState=PENDING", 1, true) then
			ask("1", update)
		end
	end)
end

function slurm_cli_setup_defaults(options, early)
	return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
	return slurmdl_pre_submit(options, offset)
end

function slurm_cli_post_submit(offset, job, step)
	slurmdl_post_submit(job)
	return slurm.SUCCESS
end
