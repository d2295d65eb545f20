-- job_submit.lua of Slurm with slurmdl, for sites that cannot use etc/cli_filter.lua. Install it next to the controller's
-- slurm.conf, with JobSubmitPlugins=lua. Prefer cli_filter.lua: this script has less information and blocks the controller.
--
--  * The controller holds its locks meanwhile and cannot be queried. slurmdl reads TOPOLOGY and a snapshot that a timer
--    writes to a temporary file and renames to SNAPSHOT:
--        scontrol -o -d show nodes; scontrol -o show partitions
--    A snapshot older than MAX_AGE seconds is ignored.
--  * It sets a preferred zone, the zones of --dl-zone, or the binding of --dl-node-binding=nodelist or zone. It sets no
--    node list for --dl-node-binding=auto, because it could not revert it. A preference that no longer fits costs one
--    pass of the backfill scheduler.
--  * It handles batch jobs with SLURMDL_OPT_* in their environment (set by users or by the plugin), which excludes
--    --export=NONE. --dl-comm-pattern and --dl-link-scores are not applied: they may name the user's files, and this
--    script runs as SlurmUser.
--  * Jobs that request more than counts, memory, a partition, features or excluded nodes are not changed.
--
-- It never rejects a job, and changes none if slurmdl is missing, slow or fails.

local SLURMDL = "slurmdl"
local SNAPSHOT = "/run/slurmdl/snapshot"
local TOPOLOGY = "/etc/slurm/topology.conf"
local MAX_AGE = 15    -- seconds
local TIMEOUT_S = "1" -- the controller waits

local OPTIONS = {"STRATEGY", "PS", "NODE_BINDING", "ZONE", "RANK0", "ISLANDS", "MESH", "GROUPS", "MODEL", "BYTES",
                 "LAUNCHER", "PREFLIGHT", "ON_BAD_NODES", "ON_SLOW"}
-- fields that the choice does not model, or by which the user chooses nodes
local UNMODELLED_FIELDS = {"req_nodes", "prefer", "array_inx", "dependency", "reservation", "licenses", "burst_buffer", "network",
	"tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task", "cpus_per_tres", "mem_per_tres"}
-- fields that the choice depends on, and the corresponding options of sbatch
local COUNTS = {num_tasks = "ntasks", ntasks_per_node = "ntasks-per-node", cpus_per_task = "cpus-per-task"}
local TEXTS = {partition = "partition", features = "constraint", exc_nodes = "exclude"}

local function quote(word)
	return "'" .. word:gsub("'", "'\\''") .. "'"
end

local function is_set(number)
	return type(number) == "number" and number > 0 and number ~= slurm.NO_VAL and number ~= slurm.NO_VAL16
end

local function place_command(job)
	local env = job.script and job.environment
	if not env or env.SLURMDL_SUBMISSION or env.SLURM_JOB_ID or env.SLURMDL_OPT_COMM_PATTERN or env.SLURMDL_OPT_LINK_SCORES then
		return nil
	end
	for _, name in ipairs(UNMODELLED_FIELDS) do
		if job[name] and job[name] ~= "" then return nil end
	end
	if is_set(job.begin_time) or not is_set(job.min_nodes) or job.min_nodes ~= job.max_nodes then return nil end
	local line = {"place", "--json", "--wrap=:", "--cluster=" .. quote(SNAPSHOT), "--topology=" .. quote(TOPOLOGY),
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
	if is_set(job.segment_size) then line[#line + 1] = string.format("--segment=%d", job.segment_size) end
	if is_set(job.min_mem_per_node) then line[#line + 1] = string.format("--mem=%d", job.min_mem_per_node) end
	if is_set(job.min_mem_per_cpu) then line[#line + 1] = string.format("--mem-per-cpu=%d", job.min_mem_per_cpu) end
	if job.shared == 0 then line[#line + 1] = "--exclusive" end
	return any and table.concat(line, " "), env.SLURMDL_OPT_NODE_BINDING
end

local function choose(job)
	local line, node_binding = place_command(job)
	if not line or node_binding == "off" then return end
	-- `find` prints the snapshot if it is new enough
	local is_new = string.format("[ -n \"$(find %s -newermt '-%d seconds')\" ]", quote(SNAPSHOT), MAX_AGE)
	local command = is_new .. " && exec env -i PATH=\"$PATH\" HOME=/ " .. quote(SLURMDL) .. " " .. line
	local pipe = io.popen("cd / && exec timeout -k 1 " .. TIMEOUT_S .. " sh -c " .. quote(command) ..
		" </dev/null 2>/dev/null")
	local answer = pipe and pipe:read(1000000) or ""
	if pipe then pipe:close() end
	local list = answer:find("^%s*{.*}%s*$") and answer:match('"binding"%s*:%s*(%b[])') or ""
	for name, value in list:gmatch('"%-%-(%l+)=([%w%.,_|&:=+*()%[%]-]+)"') do
		if name == "exclude" then
			job.exc_nodes = value
		elseif name == "prefer" then
			job.prefer = value
		elseif name == "nodelist" and node_binding == "nodelist" then
			job.req_nodes = value
		elseif name == "constraint" and node_binding == "zone" then
			job.features = value
		elseif name == "switches" and node_binding == "zone" and tonumber(value) then
			job.req_switch = tonumber(value)
		elseif name == "segment" and node_binding == "zone" and tonumber(value) and job.segment_size then
			job.segment_size = tonumber(value) -- a field of newer releases, not of 24.11
		end
	end
end

function slurm_job_submit(job_desc, part_list, submit_uid)
	local fine, reason = pcall(choose, job_desc)
	if not fine then slurm.log_info("%s", "slurmdl: " .. tostring(reason)) end
	return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
	return slurm.SUCCESS
end
