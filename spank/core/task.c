#include "task.h"

#include "options.h"

#include <stdio.h>
#include <string.h>

static void copy(char to[DL_NAME_MAX + 1], struct dl_span from)
{
	memcpy(to, from.at, from.length);
	to[from.length] = '\0';
}

/* SLURM_TOPOLOGY_ADDR: zones from the root down and the node, separated by dots: spine.leafA.n1 */
static struct dl_span zones_of(const struct dl_task *task)
{
	struct dl_span zones = {"", 0};
	if (!task->address || !task->node)
		return zones;
	size_t address = strnlen(task->address, DL_TEXT_MAX), node = strnlen(task->node, DL_TEXT_MAX);
	if (address > node + 1 && task->address[address - node - 1] == '.' &&
	    !memcmp(task->address + address - node, task->node, node))
		zones = (struct dl_span){task->address, address - node - 1};
	return zones;
}

static struct dl_span leaf_of(struct dl_span zones)
{
	const char *start = zones.at + zones.length;
	while (start > zones.at && start[-1] != '.')
		start--;
	size_t length = (size_t)(zones.at + zones.length - start);
	return (struct dl_span){start, length <= DL_NAME_MAX ? length : 0};
}

static bool ends_with(struct dl_span zones, struct dl_span zone)
{
	if (zone.length > zones.length || memcmp(zones.at + zones.length - zone.length, zone.at, zone.length))
		return false;
	return zone.length == zones.length || zones.at[zones.length - zone.length - 1] == '.';
}

static bool malformed(struct dl_task_env *env, const char *variable, const char *why)
{
	snprintf(env->warning, sizeof(env->warning), "%s is malformed (%s); the step runs without its map", variable, why);
	return false;
}

/* Roles without a map: the first ranks are the parameter servers. Only a map has the nodes of groups. */
static void from_rank(const struct dl_task *task, struct dl_task_env *env)
{
	unsigned servers = 0;
	if (task->groups)
		return;
	bool wanted = task->strategy ? !strcmp(task->strategy, "ps") : task->servers != NULL;
	if (wanted && !(task->servers && dl_number(task->servers, &servers)))
		servers = 1;
	if (servers && servers >= task->size) {
		if (!env->warning[0])
			snprintf(env->warning, sizeof(env->warning),
				 "--dl-ps=%u: the step has %u task%s and needs at least one worker; no task gets a role",
				 servers, task->size, task->size == 1 ? "" : "s");
		return;
	}
	snprintf(env->role, sizeof(env->role), "%s", task->rank < servers ? "ps" : "worker");
	env->role_rank = task->rank < servers ? task->rank : task->rank - servers;
}

/* Role, zone and master from the map; false if it does not apply to this step. */
static bool from_map(const struct dl_task *task, struct dl_task_env *env)
{
	uint32_t size = 0, port = 0, role_rank, ignored;
	struct dl_span role, zone, node = {"", 0};
	enum dl_error error;

	if (!dl_number(task->map_size, &size))
		return malformed(env, "SLURMDL_WORLD_SIZE", dl_error_text(DL_BAD_NUMBER));
	if (size != task->size) {
		snprintf(env->warning, sizeof(env->warning),
			 "the map has %u tasks, the step %u; the step runs without its map", size, task->size);
		return false;
	}
	/* srun ignores the host file with -w or -F */
	if (!task->distribution || strcmp(task->distribution, "arbitrary")) {
		snprintf(env->warning, sizeof(env->warning),
			 "srun did not apply the map (it does without -w and -F); the step runs without its map");
		return false;
	}
	error = dl_name_of(task->role_ranks ? task->role_ranks : "", size, task->rank, &role, &role_rank);
	if (error)
		return malformed(env, "SLURMDL_ROLE_RANKS", dl_error_text(error));
	error = dl_name_of(task->zone_ranks ? task->zone_ranks : "", size, task->rank, &zone, &ignored);
	if (error)
		return malformed(env, "SLURMDL_ZONE_RANKS", dl_error_text(error));
	struct dl_span master = {task->master, task->master ? strnlen(task->master, DL_NAME_MAX + 1) : 0};
	if (!master.length || master.length > DL_NAME_MAX)
		return malformed(env, "SLURMDL_MASTER_ADDR", dl_error_text(DL_BAD_NAME));
	if (!task->port || !dl_number(task->port, &port) || !port || port > 65535)
		return malformed(env, "SLURMDL_MASTER_PORT", "expected a port");
	error = task->nodes ? dl_node_of(task->nodes, task->rank, &node) : DL_OK;
	if (error)
		return malformed(env, "SLURMDL_RANKMAP_NODES", dl_error_text(error));

	if (task->role_ranks) {
		copy(env->role, role);
		env->role_rank = role_rank;
	} else {
		from_rank(task, env);
	}
	copy(env->zone, task->zone_ranks ? zone : leaf_of(zones_of(task)));
	copy(env->master, master);
	env->port = port;

	struct dl_span real = zones_of(task);
	char shown[2][DL_PRINTABLE];
	if (node.length && task->node && !dl_span_is(node, task->node))
		snprintf(env->warning, sizeof(env->warning), "rank %u is on %s, but on %s in the map", task->rank,
			 dl_printable(task->node, strlen(task->node), shown[0]), dl_printable(node.at, node.length, shown[1]));
	else if (zone.length && real.length && !ends_with(real, zone))
		snprintf(env->warning, sizeof(env->warning), "rank %u is in %s, but in zone %s in the map", task->rank,
			 dl_printable(real.at, real.length, shown[0]), dl_printable(zone.at, zone.length, shown[1]));
	else
		return true;
	env->node_specific = true;
	return true;
}

void dl_task_env_fill(const struct dl_task *task, struct dl_task_env *env)
{
	memset(env, 0, sizeof(*env));
	if (task->mapped && task->map_size)
		env->mapped = from_map(task, env);
	if (env->mapped)
		return;
	from_rank(task, env);
	copy(env->zone, leaf_of(zones_of(task)));
}
