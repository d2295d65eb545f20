-- Slurm's job_submit.lua with slurmdl, for sites that cannot have etc/cli_filter.lua. Beside slurm.conf of the
-- controller, with JobSubmitPlugins=lua. Prefer the other one: this one knows less, and the controller waits for it.
--
--  * Here the controller cannot be asked: it holds its locks meanwhile. slurmdl reads what a timer has written,
--        scontrol -o -d show nodes; scontrol -o show partitions   > SURVEY, by way of a file that is then renamed
--    and TOPOLOGY. Of a survey older than MAX_AGE nothing is made.
--  * Only a preferred zone, the limit of --dl-zone, or what --dl-node-binding=nodelist or zone asks for, is set; a node list for
--    --dl-node-binding=auto is not, as nothing could take it back here. A preference that no longer fits costs a pass of the backfill scheduler.
--  * It sees the batch jobs whose environment has SLURMDL_OPT_* (the plugin's options among them), not what is under
--    --export=NONE, and no files: --dl-comm-pattern=FILE and --dl-link-scores=FILE are the user's, and this runs as SlurmUser.
--  * Jobs that ask for more than counts, memory, a partition, features or nodes to leave out are left alone.
--
-- It never refuses a job, and changes none where slurmdl is missing, late or not understood.

local SLURMDL = "slurmdl"
local SURVEY = "/run/slurmdl/survey"
local TOPOLOGY = "/etc/slurm/topology.conf"
local MAX_AGE = 15  -- seconds
local SECONDS = "1" -- that the controller may wait

local OPTIONS = {"STRATEGY", "PS", "PLACE", "NODE_BINDING", "ZONE", "RANK0", "MODEL_BYTES", "PROBE"}
-- what the choice does not look at, or the user chooses
local OTHERS = {"req_nodes", "prefer", "array_inx", "dependency", "reservation", "licenses", "burst_buffer", "network",
	"tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task", "cpus_per_tres", "mem_per_tres"}
-- what of the job its place depends on, and the option of sbatch that says so
local COUNTS = {num_tasks = "ntasks", ntasks_per_node = "ntasks-per-node", cpus_per_task = "cpus-per-task"}
local TEXTS = {partition = "partition", features = "constraint", exc_nodes = "exclude"}

local function quote(word)
	return "'" .. word:gsub("'", "'\\''") .. "'"
end

local function is_set(number)
	return type(number) == "number" and number > 0 and number ~= slurm.NO_VAL and number ~= slurm.NO_VAL16
end

local function question(job)
	local env = job.script and job.environment
	if not env or env.SLURMDL_SUBMISSION or env.SLURM_JOB_ID or env.SLURMDL_OPT_COMM_PATTERN or env.SLURMDL_OPT_LINK_SCORES then
		return nil
	end
	for _, name in ipairs(OTHERS) do
		if job[name] and job[name] ~= "" then return nil end
	end
	if is_set(job.begin_time) or not is_set(job.min_nodes) or job.min_nodes ~= job.max_nodes then return nil end
	local line = {"place", "--json", "--wrap=:", "--cluster=" .. quote(SURVEY), "--topology=" .. quote(TOPOLOGY),
		string.format("--nodes=%d", job.min_nodes)}
	local any = false
	for _, name in ipairs(OPTIONS) do
		local value = env["SLURMDL_OPT_" .. name]
		if value then
			any = true
			line[#line + 1] = quote("--dl-" .. name:lower():gsub("_", "-") .. "=" .. value)
		end
	end
	for name, option in pairs(COUNTS) do
		if is_set(job[name]) then line[#line + 1] = string.format("--%s=%d", option, job[name]) end
	end
	for name, option in pairs(TEXTS) do
		if job[name] and job[name] ~= "" then line[#line + 1] = quote("--" .. option .. "=" .. job[name]) end
	end
	if is_set(job.min_mem_per_node) then line[#line + 1] = string.format("--mem=%d", job.min_mem_per_node) end
	if is_set(job.min_mem_per_cpu) then line[#line + 1] = string.format("--mem-per-cpu=%d", job.min_mem_per_cpu) end
	if job.shared == 0 then line[#line + 1] = "--exclusive" end
	return any and table.concat(line, " "), env.SLURMDL_OPT_NODE_BINDING
end

local function choose(job)
	local line, bind = question(job)
	if not line or bind == "off" then return end
	-- the age is the shell's to tell; `find` names the survey where it is young
	local young = string.format("[ -n \"$(find %s -newermt '-%d seconds')\" ]", quote(SURVEY), MAX_AGE)
	local command = young .. " && exec env -i PATH=\"$PATH\" HOME=/ " .. quote(SLURMDL) .. " " .. line
	local pipe = io.popen("cd / && exec timeout -k 1 " .. SECONDS .. " sh -c " .. quote(command) ..
		" </dev/null 2>/dev/null")
	local answer = pipe and pipe:read(1000000) or ""
	if pipe then pipe:close() end
	local list = answer:find("^%s*{.*}%s*$") and answer:match('"binding"%s*:%s*(%b[])') or ""
	for name, value in list:gmatch('"%-%-(%l+)=([%w%.,_|&:=+%[%]-]+)"') do
		if name == "exclude" then
			job.exc_nodes = value
		elseif name == "prefer" then
			job.prefer = value
		elseif name == "nodelist" and bind == "nodelist" then
			job.req_nodes = value
		elseif name == "constraint" and bind == "zone" then
			job.features = value
		elseif name == "switches" and bind == "zone" and tonumber(value) then
			job.req_switch = tonumber(value)
		end
	end
end

function slurm_job_submit(job_desc, part_list, submit_uid)
	local fine, why = pcall(choose, job_desc)
	if not fine then slurm.log_info("%s", "slurmdl: " .. tostring(why)) end
	return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
	return slurm.SUCCESS
end
