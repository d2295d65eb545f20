/* The variables of a task, as slurmstepd sets them in the child that becomes it. */
#include "core/task.h"
#include "glue.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <string.h>

/* A variable of the task's environment; it stays readable until it is itself changed. */
const char *dl_find(spank_t spank, const char *name)
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

uint32_t dl_item(spank_t spank, spank_item_t which)
{
	uint32_t value = 0;
	return spank_get_item(spank, which, &value) ? 0 : value;
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

struct names {
	spank_t spank;
	char before[256]; /* SLURMDL_SET of the task that started this step: what is ours, and not the user's */
	char ours[256];
};

/* Sets a variable unless the user has; takes away what a task before left where value is NULL. */
static void set(struct names *names, const char *name, const char *value)
{
	bool stale = listed(names->before, name);
	if (dl_find(names->spank, name) && !stale)
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

static const char *const of_map[] = {"SLURMDL_PLAN", "SLURMDL_SIZE", "SLURMDL_PS_RANKS", "SLURMDL_ZONE_RANKS",
				     "SLURMDL_MASTER", "SLURMDL_PORT"};

void dl_set_all(spank_t spank, const struct dl_task *task, const struct dl_told *told)
{
	struct names names = {.spank = spank};
	const char *before = dl_find(spank, "SLURMDL_SET");
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
	set_number(&names, "LOCAL_WORLD_SIZE", dl_item(spank, S_JOB_LOCAL_TASK_COUNT));
	snprintf(text, sizeof(text), "%u", told->port);
	set(&names, "MASTER_ADDR", told->mapped ? told->master : NULL);
	set(&names, "MASTER_PORT", told->mapped ? text : NULL);
	spank_setenv(spank, "SLURMDL_SET", names.ours, 1);
	for (size_t i = 0; !told->mapped && i < sizeof(of_map) / sizeof(*of_map); i++)
		spank_unsetenv(spank, of_map[i]); /* of the step that this one was started from */
	if (told->mapped) /* a step that is started from this task has an order of its own */
		spank_unsetenv(spank, "SLURM_DISTRIBUTION");
}
