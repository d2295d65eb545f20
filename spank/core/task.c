#include "task.h"

#include "options.h"

#include <stdio.h>
#include <string.h>

static void copy(char to[DL_NAME_MAX + 1], struct dl_span from)
{
	memcpy(to, from.at, from.length);
	to[from.length] = '\0';
}

/* SLURM_TOPOLOGY_ADDR is the zones from the root down and the node, with points between: spine.leafA.n1 */
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

static bool malformed(struct dl_told *told, const char *variable, const char *why)
{
	snprintf(told->doubt, sizeof(told->doubt), "%s is malformed (%s); the step runs without its map", variable, why);
	return false;
}

/* Where no map says otherwise the first ranks are the parameter servers. */
static void from_rank(const struct dl_task *task, struct dl_told *told)
{
	unsigned servers = 0;
	bool wanted = task->strategy ? !strcmp(task->strategy, "ps") : task->servers != NULL;
	if (wanted && !(task->servers && dl_number(task->servers, &servers)))
		servers = 1;
	if (servers && servers >= task->size) {
		if (!told->doubt[0])
			snprintf(told->doubt, sizeof(told->doubt),
				 "--dl-ps=%u: the step has %u tasks, and at least one must be a worker; none has a role",
				 servers, task->size);
		return;
	}
	told->role = task->rank < servers ? "ps" : "worker";
	told->role_rank = task->rank < servers ? task->rank : task->rank - servers;
}

/* Role, zone and master from the map; false where it does not hold for this step. */
static bool from_map(const struct dl_task *task, struct dl_told *told)
{
	uint32_t size = 0, port = 0;
	struct dl_position servers;
	struct dl_span zone, node = {"", 0};
	enum dl_error error;

	if (!dl_number(task->map_size, &size))
		return malformed(told, "SLURMDL_SIZE", dl_error_text(DL_BAD_NUMBER));
	if (size != task->size) {
		snprintf(told->doubt, sizeof(told->doubt),
			 "the map is of %u tasks and the step has %u; it runs without its map", size, task->size);
		return false;
	}
	/* srun takes no host file beside -w or -F */
	if (!task->distribution || strcmp(task->distribution, "arbitrary")) {
		snprintf(told->doubt, sizeof(told->doubt),
			 "srun has not followed the map (without -w and -F it does); the step runs without its map");
		return false;
	}
	const char *list = task->ps_ranks ? task->ps_ranks : "";
	error = dl_find_rank((struct dl_span){list, strnlen(list, DL_TEXT_MAX + 1)}, size, task->rank, &servers);
	if (error)
		return malformed(told, "SLURMDL_PS_RANKS", dl_error_text(error));
	error = dl_zone_of(task->zone_ranks ? task->zone_ranks : "", size, task->rank, &zone);
	if (error)
		return malformed(told, "SLURMDL_ZONE_RANKS", dl_error_text(error));
	struct dl_span master = {task->master, task->master ? strnlen(task->master, DL_NAME_MAX + 1) : 0};
	if (!master.length || master.length > DL_NAME_MAX)
		return malformed(told, "SLURMDL_MASTER", dl_error_text(DL_BAD_NAME));
	if (!task->port || !dl_number(task->port, &port) || !port || port > 65535)
		return malformed(told, "SLURMDL_PORT", "a port was expected");
	error = task->nodes ? dl_node_of(task->nodes, task->rank, &node) : DL_OK;
	if (error)
		return malformed(told, "SLURMDL_MAP_NODES", dl_error_text(error));

	if (task->ps_ranks) {
		told->role = servers.in ? "ps" : "worker";
		told->role_rank = servers.in ? servers.rank : task->rank - servers.rank;
	} else {
		from_rank(task, told);
	}
	copy(told->zone, task->zone_ranks ? zone : leaf_of(zones_of(task)));
	copy(told->master, master);
	told->port = port;

	struct dl_span real = zones_of(task);
	char shown[2][DL_SHOWN];
	if (node.length && task->node && !dl_span_is(node, task->node))
		snprintf(told->doubt, sizeof(told->doubt), "rank %u is on %s, and on %s in the map", task->rank,
			 dl_shown(task->node, strlen(task->node), shown[0]), dl_shown(node.at, node.length, shown[1]));
	else if (zone.length && real.length && !ends_with(real, zone))
		snprintf(told->doubt, sizeof(told->doubt), "rank %u is in %s, and in zone %s in the map", task->rank,
			 dl_shown(real.at, real.length, shown[0]), dl_shown(zone.at, zone.length, shown[1]));
	else
		return true;
	told->local = true;
	return true;
}

void dl_tell(const struct dl_task *task, struct dl_told *told)
{
	memset(told, 0, sizeof(*told));
	if (task->mapped && task->map_size)
		told->mapped = from_map(task, told);
	if (told->mapped)
		return;
	from_rank(task, told);
	copy(told->zone, leaf_of(zones_of(task)));
}
