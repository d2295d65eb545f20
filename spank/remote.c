/* slurmstepd, in the child that becomes a task, as the job's user: the variables that differ per task. What Slurm
 * tells and what the step's environment holds is all that is read, and nothing here can fail a task. */
#include "core/task.h"
#include "glue.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <string.h>

/* options of the step, "" for a flag; set before the tasks are forked */
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
	if (index < DL_OPT_MAP && dl_options[index].kind != DL_FLAG) {
		if (!dl_option_check(&dl_options[index], value, dl_options[index].name, message))
			return;
		strcpy(given[index], value);
	}
	is_given[index] = true;
}

/* A variable of the task's environment; it stays readable until it is itself changed. */
static const char *find(spank_t spank, const char *name)
{
	char **env = NULL;
	size_t length = strlen(name);
	if (spank_get_item(spank, S_JOB_ENV, &env))
		return NULL;
	for (; env && *env; env++)
		if (!strncmp(*env, name, length) && (*env)[length] == '=')
			return *env + length + 1;
	return NULL;
}

/* Whether a name is in a list of words. */
static bool listed(const char *words, const char *name)
{
	size_t length = strlen(name);
	while (words && *words) {
		words += strspn(words, " ");
		size_t word = strcspn(words, " ");
		if (word == length && !memcmp(words, name, length))
			return true;
		words += word;
	}
	return false;
}

/* Gives the task the options that its environment lacks, as --export keeps only some names. Whether there are any. */
static bool hand_on_options(spank_t spank)
{
	bool any = is_given[DL_OPT_MAP];
	for (int i = 0; i < DL_OPTIONS; i++) {
		const char *value = is_given[i] ? given[i] : find(spank, dl_options[i].slurms);
		if (value && dl_options[i].kind == DL_FLAG)
			value = "";
		if (value && !find(spank, dl_options[i].variable))
			spank_setenv(spank, dl_options[i].variable, value, 0);
		any = any || value || find(spank, dl_options[i].variable);
	}
	return any;
}

/* An option's value, NULL where it is not given or not valid. */
static const char *valid(spank_t spank, int index)
{
	char message[DL_MESSAGE];
	const char *value = find(spank, dl_options[index].variable);
	return value && dl_option_check(&dl_options[index], value, "", message) ? value : NULL;
}

static uint32_t item(spank_t spank, spank_item_t which)
{
	uint32_t value = 0;
	return spank_get_item(spank, which, &value) ? 0 : value;
}

struct names {
	spank_t spank;
	char before[256]; /* SLURMDL_SET of the task that started this step: what is ours, and not the user's */
	char ours[256];
};

/* Sets a variable unless the user has; takes away what a task before left where value is NULL. */
static void set(struct names *names, const char *name, const char *value)
{
	bool stale = listed(names->before, name);
	if (find(names->spank, name) && !stale)
		return;
	if (!value) {
		spank_unsetenv(names->spank, name);
		return;
	}
	spank_setenv(names->spank, name, value, 1);
	size_t end = strlen(names->ours);
	snprintf(names->ours + end, sizeof(names->ours) - end, " %s", name);
}

static void set_number(struct names *names, const char *name, uint32_t value)
{
	char text[16];
	snprintf(text, sizeof(text), "%u", value);
	set(names, name, text);
}

/* One line for the user from rank 0, and on what only a task itself can see from the first nodes. */
static void warn(spank_t spank, const struct dl_task *task, const struct dl_told *told)
{
	uint32_t node = item(spank, S_JOB_NODEID);
	int local = 0;
	bool first = !spank_get_item(spank, S_TASK_ID, &local) && local == 0;
	if (told->doubt[0] && (told->local ? first && node < 4 : task->rank == 0))
		slurm_spank_log("slurmdl: %s", told->doubt);
}

static const char *const of_map[] = {"SLURMDL_PLAN", "SLURMDL_SIZE", "SLURMDL_PS_RANKS", "SLURMDL_ZONE_RANKS",
				     "SLURMDL_MASTER", "SLURMDL_PORT"};

static void set_all(spank_t spank, const struct dl_task *task, const struct dl_told *told)
{
	struct names names = {.spank = spank};
	const char *before = find(spank, "SLURMDL_SET");
	char text[16];
	int local = 0;

	snprintf(names.before, sizeof(names.before), "%s", before ? before : "");
	spank_get_item(spank, S_TASK_ID, &local);
	snprintf(text, sizeof(text), "%u", told->role_rank);
	if (told->role) {
		spank_setenv(spank, "SLURMDL_ROLE", told->role, 1);
		spank_setenv(spank, "SLURMDL_ROLE_RANK", text, 1);
	} else {
		spank_unsetenv(spank, "SLURMDL_ROLE");
		spank_unsetenv(spank, "SLURMDL_ROLE_RANK");
	}
	spank_setenv(spank, "SLURMDL_ZONE", told->zone, 1);
	set_number(&names, "RANK", task->rank);
	set_number(&names, "WORLD_SIZE", task->size);
	set_number(&names, "LOCAL_RANK", (uint32_t)local);
	set_number(&names, "LOCAL_WORLD_SIZE", item(spank, S_JOB_LOCAL_TASK_COUNT));
	snprintf(text, sizeof(text), "%u", told->port);
	set(&names, "MASTER_ADDR", told->mapped ? told->master : NULL);
	set(&names, "MASTER_PORT", told->mapped ? text : NULL);
	spank_setenv(spank, "SLURMDL_SET", names.ours, 1);
	for (size_t i = 0; !told->mapped && i < sizeof(of_map) / sizeof(*of_map); i++)
		spank_unsetenv(spank, of_map[i]); /* of the step that this one was started from */
	if (told->mapped) /* a step that is started from this task has an order of its own */
		spank_unsetenv(spank, "SLURM_DISTRIBUTION");
}

void dl_remote_task(spank_t spank)
{
	static struct dl_told told;
	bool asked = hand_on_options(spank);
	struct dl_task task = {
		.rank = item(spank, S_TASK_GLOBAL_ID), .size = item(spank, S_JOB_TOTAL_TASK_COUNT),
		.step = item(spank, S_JOB_STEPID), .strategy = valid(spank, DL_OPT_STRATEGY),
		.servers = valid(spank, DL_OPT_PS), .mapped = is_given[DL_OPT_MAP],
		.map_size = find(spank, "SLURMDL_SIZE"), .ps_ranks = find(spank, "SLURMDL_PS_RANKS"),
		.zone_ranks = find(spank, "SLURMDL_ZONE_RANKS"), .master = find(spank, "SLURMDL_MASTER"),
		.port = find(spank, "SLURMDL_PORT"), .nodes = find(spank, "SLURMDL_MAP_NODES"),
		.node = find(spank, "SLURMD_NODENAME"), .address = find(spank, "SLURM_TOPOLOGY_ADDR"),
		.distribution = find(spank, "SLURM_DISTRIBUTION")};

	/* batch scripts and the like are no ranks; behind `slurmdl srun` a shell before the program sets all this */
	if (task.step > SLURM_MAX_NORMAL_STEP_ID || find(spank, "SLURMDL_TASK"))
		return;
	if (!asked && !find(spank, "SLURMDL_SET"))
		return;
	dl_tell(&task, &told);
	warn(spank, &task, &told);
	set_all(spank, &task, &told);
}
