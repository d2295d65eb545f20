/* Environment variables of a task, set by slurmstepd in the child that becomes the task. */
#include "core/task.h"
#include "plugin.h"

#include <slurm/slurm.h>
#include <stdio.h>
#include <string.h>

/* A variable of the task's environment; valid until the variable changes. */
const char *dl_getenv(spank_t spank, const char *name)
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

uint32_t dl_spank_item(spank_t spank, spank_item_t which)
{
	uint32_t value = 0;
	return spank_get_item(spank, which, &value) ? 0 : value;
}

/* Whether a space-separated list contains a name. */
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
	char previous[256]; /* SLURMDL_EXPORTED of the task that started this step: variables set by slurmdl, not by the user */
	char exported[256];
};

/* Set a variable unless the user did; with value NULL, unset one left by an enclosing task. */
static void set(struct names *names, const char *name, const char *value)
{
	bool stale = listed(names->previous, name);
	if (dl_getenv(names->spank, name) && !stale)
		return;
	if (!value) {
		spank_unsetenv(names->spank, name);
		return;
	}
	spank_setenv(names->spank, name, value, 1);
	size_t end = strlen(names->exported);
	snprintf(names->exported + end, sizeof(names->exported) - end, " %s", name);
}

static void set_number(struct names *names, const char *name, uint32_t value)
{
	char text[16];
	snprintf(text, sizeof(text), "%u", value);
	set(names, name, text);
}

static const char *const map_variables[] = {"SLURMDL_PLAN", "SLURMDL_WORLD_SIZE", "SLURMDL_ROLE_RANKS", "SLURMDL_ZONE_RANKS",
					    "SLURMDL_MASTER_ADDR", "SLURMDL_MASTER_PORT"};

void dl_export_task_env(spank_t spank, const struct dl_task *task, const struct dl_task_env *env)
{
	struct names names = {.spank = spank};
	const char *previous = dl_getenv(spank, "SLURMDL_EXPORTED");
	char text[16];
	int local = 0;

	snprintf(names.previous, sizeof(names.previous), "%s", previous ? previous : "");
	spank_get_item(spank, S_TASK_ID, &local);
	snprintf(text, sizeof(text), "%u", env->role_rank);
	if (env->role[0]) {
		spank_setenv(spank, "SLURMDL_ROLE", env->role, 1);
		spank_setenv(spank, "SLURMDL_ROLE_RANK", text, 1);
	} else {
		spank_unsetenv(spank, "SLURMDL_ROLE");
		spank_unsetenv(spank, "SLURMDL_ROLE_RANK");
	}
	spank_setenv(spank, "SLURMDL_ZONE", env->zone, 1);
	set_number(&names, "RANK", task->rank);
	set_number(&names, "WORLD_SIZE", task->size);
	set_number(&names, "LOCAL_RANK", (uint32_t)local);
	set_number(&names, "LOCAL_WORLD_SIZE", dl_spank_item(spank, S_JOB_LOCAL_TASK_COUNT));
	snprintf(text, sizeof(text), "%u", env->port);
	set(&names, "MASTER_ADDR", env->mapped ? env->master : NULL);
	set(&names, "MASTER_PORT", env->mapped ? text : NULL);
	spank_setenv(spank, "SLURMDL_EXPORTED", names.exported, 1);
	for (size_t i = 0; !env->mapped && i < sizeof(map_variables) / sizeof(*map_variables); i++)
		spank_unsetenv(spank, map_variables[i]); /* inherited from the enclosing step */
	/* must not affect a step started from this task */
	if (env->mapped)
		spank_unsetenv(spank, "SLURM_DISTRIBUTION");
}
