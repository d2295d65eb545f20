-- cli_filter.lua of Slurm with slurmdl: plain `sbatch --dl-...` chooses nodes as `slurmdl sbatch` does.
-- Install it next to slurm.conf on login nodes, with CliFilterPlugins=lua and the SPANK plugin (spank/README.md), which
-- parses the options. A site's existing cli_filter.lua can call slurmdl_pre_submit and slurmdl_post_submit instead.
--
-- It runs in the user's sbatch with the user's rights and prints the messages of `slurmdl sbatch`. An invalid option
-- rejects the job. On any other failure the job is submitted as written, or rejected with --dl-strict. All user input
-- is quoted for the shell.

local SLURMDL = "slurmdl" -- name or path of the program; a path overrides the users' PATH
local TIMEOUT_S = "2"     -- of a choice

local function words(text)
	local set = {}
	for word in text:gmatch("%S+") do set[word] = true end
	return set
end

-- sbatch(1): options without a value, and with an optional value
local FLAGS = words [[
	consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit oversubscribe parsable
	quiet reboot spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait
]]
local OPTIONAL = words "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
-- options without influence on the choice of nodes
local IGNORED_OPTIONS = words [[
	chdir comment error export-file help input job-name mail-type mail-user output parsable quiet test-only usage
	verbose version wait wckey wrap
]]
-- options that a choice may set, and job fields that are reverted if the job does not start with them
local BINDING = words "prefer nodelist constraint switches segment exclude"
local REVERT_FIELDS = words "Prefer ReqNodeList"

local revert_field -- of this submission

local function quote(word)
	return "'" .. word:gsub("'", "'\\''") .. "'"
end

local function print_line(line)
	io.stderr:write("slurmdl: ", line, "\n")
end

local function read_file(name)
	local file = io.open(name)
	local text = file and file:read("*a")
	if file then file:close() end
	return text
end

local function process_id()
	return tonumber((read_file("/proc/self/stat") or ""):match("^%d+")) or 0
end

-- Output of a command, "" on failure or timeout.
local function run_command(seconds, command)
	local pipe = io.popen("exec timeout -k 1 " .. seconds .. " " .. command .. " </dev/null 2>/dev/null")
	local text = pipe and pipe:read(1000000)
	if pipe then pipe:close() end
	return text or ""
end

-- Run slurmdl: its stdout, its message on stderr without "slurmdl: " (nil if none), and its exit status (nil if the
-- output is incomplete).
local function run_slurmdl(line)
	local pipe = io.popen("timeout -k 1 " .. TIMEOUT_S .. " " .. line .. " </dev/null 2>&1; printf '\\nstatus %d' $?")
	local text = pipe and pipe:read(1000000) or ""
	if pipe then pipe:close() end
	local output, status = text:match("^(.*)\nstatus (%d+)$")
	local message
	local out = (output or ""):gsub("[^\n]+", function(line)
		message = line:match("^slurmdl: (.*)$") or message
		return line:find("^slurmdl: ") and "" or line
	end)
	return out, message and message:gsub("%c", " "):sub(1, 4000), tonumber(status)
end

-- Index of the closing quote of the JSON string that starts at `at`, or nil.
local function string_end(text, at)
	if text:sub(at, at) ~= '"' then return nil end
	local quoted = text:find('["\\]', at + 1)
	while quoted and text:sub(quoted, quoted) == "\\" do
		quoted = text:find('["\\]', quoted + 2)
	end
	return quoted
end

-- Names of the given options, from a JSON object of strings and lists of strings; nil for anything else, as a choice
-- requires all options to be known.
local function option_names(json)
	local names, at = {}, json:find("{", 1, true)
	while at do
		local _, last, name = json:find('^[{,]%s*"([%w:_-]+)"%s*:%s*', at)
		if not last then return json:find("^[{,]?%s*}%s*$", at) and names end
		names[#names + 1] = name
		at = last + 1
		if json:sub(at, at) == "[" then
			local item = json:match("^%[%s*()", at)
			while json:sub(item, item) == '"' do
				item = string_end(json, item)
				item = item and json:match("^%s*,?%s*()", item + 1)
				if not item then return nil end
			end
			if json:sub(item, item) ~= "]" then return nil end
			at = item
		else
			at = string_end(json, at)
		end
		at = at and json:match("^%s*()", at + 1)
	end
	return nil
end

-- Command line of `slurmdl place`: sbatch's options after script, environment and command line. The plugin has put the
-- --dl-* options into the environment.
local function place_command(options)
	local names = option_names(slurm.json_cli_options(options) or "")
	if not names then return nil end
	-- concurrent submitters should not get the same of equivalent nodes
	local seed = 1 + (os.time() * 7919 + process_id() * 104729) % 4294967295
	local line = {quote(SLURMDL), "place", "--json", "--wrap=:", string.format("--seed=%.0f", seed)}
	for _, name in ipairs(names) do
		if not (IGNORED_OPTIONS[name] or name == "argv" or name:find("^spank:")) then
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

-- A string member of the answer, "" if it is missing.
local function member(answer, name)
	local begin = answer:match('.*"' .. name .. '"%s*:%s*()"')
	local last = begin and string_end(answer, begin)
	local text = last and answer:sub(begin + 1, last - 1) or ""
	return (text:gsub("\\u%x%x%x%x", "?"):gsub("\\(.)", "%1"):gsub("%c", " "):sub(1, 4000))
end

-- Parse the answer of `slurmdl place`: binding options as {name, value}, the revert field, and the line for the user; nil
-- and a reason if it is malformed.
local function parse_answer(answer)
	local list = answer:find("^%s*{.*}%s*$") and answer:match('"binding"%s*:%s*(%b[])')
	if not list then return nil, "no answer from slurmdl" end
	local binding = {}
	local remainder = list:sub(2, -2):gsub('"%-%-(%l+)=([%w%.,_|&:=+*()%[%]-]+)"', function(name, value)
		binding[#binding + 1] = BINDING[name] and {name, value}
		return BINDING[name] and "" or "?"
	end)
	if remainder:find("[^%s,]") then return nil, "slurmdl's choice cannot be passed to sbatch" end
	local field = member(answer, "revert_field")
	return binding, REVERT_FIELDS[field] and field, member(answer, "line")
end

-- Heterogeneous jobs are never bound. Slurm passes their components one by one, so they are detected by an argument `:`
-- or by a line in the script, if that is a readable file.
local function heterogeneous()
	local files = {}
	for word in (read_file("/proc/self/cmdline") or ""):gmatch("%Z+") do
		if word == ":" then return true end
		files[#files + 1] = quote(word)
	end
	files[#files + 1] = string.format("/proc/%d/fd/0", process_id())
	return run_command("1", "grep -lsE -D skip -d skip -e '^#SBATCH[[:space:]]+(hetjob|packjob)' -- " ..
		table.concat(files, " ")) ~= ""
end

-- The given --dl-* options; nil if there are none or no choice is to be made.
local function requested_options(options, offset)
	local dl = type(options.spank) == "table" and options.spank.slurmdl
	-- `slurmdl sbatch` has already chosen; a job inside another one is submitted as written
	if options.type ~= "sbatch" or type(dl) ~= "table" or os.getenv("SLURMDL_SUBMISSION") or os.getenv("SLURM_JOB_ID") then
		return nil
	end
	local any = false
	for _, value in pairs(dl) do any = any or value ~= "unset" end
	local off = dl["dl-node-binding"] == "off" and (dl["dl-zone"] or "unset") == "unset"
	if not any or off or offset ~= 0 or heterogeneous() then return nil end
	return dl
end

-- Whether to submit the job, and the line for the user ("" for none).
local function decide(options, dl, strict)
	local line, reason = place_command(options), "the options cannot be passed to slurmdl"
	if line then
		local answer, message, status = run_slurmdl(line)
		if status == 64 and message then return false, message end
		local binding, field, summary
		if status == 0 then
			if message then print_line(message) end -- a warning
			binding, field, summary = parse_answer(answer)
			reason = field
		else
			reason = message or "no answer from slurmdl" .. (status == 124 and " within " .. TIMEOUT_S .. " s" or "")
		end
		if binding then
			for _, option in ipairs(binding) do options[option[1]] = option[2] end
			revert_field = field
			return true, summary
		end
	end
	if strict then return false, reason end
	local zone = dl["dl-zone"] or "unset"
	if zone ~= "unset" then reason = "--dl-zone=" .. zone .. " is not applied: " .. reason end
	return true, "submitted as written: " .. reason
end

function slurmdl_pre_submit(options, offset)
	local strict = false
	local fine, submits, line = pcall(function()
		revert_field = nil
		local dl = requested_options(options, offset)
		if not dl then return true, "" end
		strict = (dl["dl-strict"] or "unset") ~= "unset"
		return decide(options, dl, strict)
	end)
	if not fine then
		submits, line = not strict, (strict and "" or "submitted as written: ") .. "internal error: " .. tostring(submits)
	end
	if line ~= "" then print_line(line) end
	return submits and slurm.SUCCESS or slurm.ERROR
end

-- A choice must not delay the start. By now the controller has tried the job on the chosen nodes: a pending job with a
-- reason has lost them; one without a reason starts in the next scheduler pass, within 4 s.
function slurmdl_post_submit(job)
	if not revert_field then return end
	pcall(function()
		local update = string.format("timeout 5 scontrol update JobId=%d %s=", job, revert_field)
		local record = run_command("1", string.format("squeue -h -a -t all -j %d -o '%%T %%r'", job))
		if record == "" or record:find("PENDING None", 1, true) then
			os.execute("setsid sh -c 'sleep 4; " .. update .. "' </dev/null >/dev/null 2>&1 &")
		elseif record:find("PENDING", 1, true) then
			run_command("1", update)
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
