/* slurmstepd, in the child that becomes a task, as the job's user: per-task variables. Reads only Slurm's data and the
 * step's environment, and never fails a task. */
#include "core/task.h"
#include "plugin.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <string.h>

/* options of the step, "" for a flag; set before tasks are forked */
static char given[DL_OPTIONS + 1][DL_VALUE_MAX + 1];
static bool is_given[DL_OPTIONS + 1];

void dl_remote_init(void)
{
	memset(is_given, 0, sizeof(is_given));
}

void dl_remote_option(int index, const char *value)
{
	char message[DL_MESSAGE];
	value = value ? value : "";
	if (index < DL_OPT_RANK_MAP && dl_options[index].kind != DL_FLAG) {
		if (!dl_option_check(&dl_options[index], value, dl_options[index].name, message))
			return;
		strcpy(given[index], value);
	}
	is_given[index] = true;
}

/* Set options missing from the task's environment (--export may drop them). Returns whether the step has any option. */
static bool inherit_options(spank_t spank)
{
	bool any = is_given[DL_OPT_RANK_MAP];
	for (int i = 0; i < DL_OPTIONS; i++) {
		const char *value = is_given[i] ? given[i] : dl_getenv(spank, dl_options[i].spank_variable);
		if (value && dl_options[i].kind == DL_FLAG)
			value = "";
		if (value && !dl_getenv(spank, dl_options[i].variable))
			spank_setenv(spank, dl_options[i].variable, value, 0);
		any = any || value || dl_getenv(spank, dl_options[i].variable);
	}
	return any;
}

/* An option's value, or NULL if it is missing or invalid. */
static const char *valid(spank_t spank, int index)
{
	char message[DL_MESSAGE];
	const char *value = dl_getenv(spank, dl_options[index].variable);
	return value && dl_option_check(&dl_options[index], value, "", message) ? value : NULL;
}

/* Values of a whole heterogeneous step exist only in the environment of its components. */
static uint32_t step_item(spank_t spank, const char *name, spank_item_t component)
{
	const char *text = dl_getenv(spank, name);
	uint32_t value;
	return text && dl_number(text, &value) ? value : dl_spank_item(spank, component);
}

/* Print the warning: rank 0 only, or the first task of the first nodes if it is specific to the node. */
static void warn(spank_t spank, const struct dl_task *task, const struct dl_task_env *env)
{
	uint32_t node = dl_spank_item(spank, S_JOB_NODEID);
	int local = 0;
	bool first = !spank_get_item(spank, S_TASK_ID, &local) && local == 0;
	if (env->warning[0] && (env->node_specific ? first && node < 4 : task->rank == 0))
		slurm_spank_log("slurmdl: %s", env->warning);
}

void dl_remote_task(spank_t spank)
{
	static struct dl_task_env env;
	bool has_options = inherit_options(spank);
	struct dl_task task = {
		.rank = step_item(spank, "SLURM_PROCID", S_TASK_GLOBAL_ID),
		.size = step_item(spank, "SLURM_STEP_NUM_TASKS", S_JOB_TOTAL_TASK_COUNT),
		.step = dl_spank_item(spank, S_JOB_STEPID),
		.strategy = valid(spank, DL_OPT_STRATEGY),
		.servers = valid(spank, DL_OPT_PS),
		.groups = valid(spank, DL_OPT_GROUPS),
		.mapped = is_given[DL_OPT_RANK_MAP],
		.map_size = dl_getenv(spank, "SLURMDL_WORLD_SIZE"),
		.role_ranks = dl_getenv(spank, "SLURMDL_ROLE_RANKS"),
		.zone_ranks = dl_getenv(spank, "SLURMDL_ZONE_RANKS"),
		.master = dl_getenv(spank, "SLURMDL_MASTER_ADDR"),
		.port = dl_getenv(spank, "SLURMDL_MASTER_PORT"),
		.nodes = dl_getenv(spank, "SLURMDL_RANKMAP_NODES"),
		.node = dl_getenv(spank, "SLURMD_NODENAME"),
		.address = dl_getenv(spank, "SLURM_TOPOLOGY_ADDR"),
		.distribution = dl_getenv(spank, "SLURM_DISTRIBUTION")};

	/* batch and extern steps have no ranks; with `slurmdl srun` a shell in front of the program sets these variables */
	if (task.step > SLURM_MAX_NORMAL_STEP_ID || dl_getenv(spank, "SLURMDL_TASK_SCRIPT"))
		return;
	if (!has_options && !dl_getenv(spank, "SLURMDL_EXPORTED"))
		return;
	dl_task_env_fill(&task, &env);
	warn(spank, &task, &env);
	dl_export_task_env(spank, &task, &env);
}
