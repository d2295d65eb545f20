/* srun --dl-rank-map: apply the job's map, passed in the environment, to the step. */
#define _GNU_SOURCE
#include "core/task.h"
#include "plugin.h"

#include <errno.h>
#include <netinet/in.h>
#include <slurm/slurm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

/* hostlist_t, and since Slurm 23.11 a pointer to it */
typedef __typeof__(slurm_hostlist_create("")) hostlist;

/* the map as an in-memory file while srun parses its options */
static int hostfile = -1;
static bool map_rejected;

/* The host file is for this step alone: its tasks may start other steps. */
void dl_rank_map_done(void)
{
	if (hostfile >= 0) {
		close(hostfile);
		unsetenv("SLURM_HOSTFILE");
	}
	hostfile = -1;
	map_rejected = false;
}

/* NULL, or the reason why the job's map cannot be applied. */
static const char *map_of_job(const char *nodes, uint32_t *size)
{
	const char *map_job = getenv("SLURMDL_RANKMAP_JOB"), *job = getenv("SLURM_JOB_ID");
	if (!nodes)
		return "the job has no map (SLURMDL_RANKMAP_NODES)";
	if (!job || !map_job || strcmp(job, map_job))
		return "SLURMDL_RANKMAP_NODES is the map of another job";
	if (dl_count_nodes(nodes, size))
		return "SLURMDL_RANKMAP_NODES is malformed; expected NODE,NODE(xTASKS),...";
	hostlist given = slurm_hostlist_create(getenv("SLURM_JOB_NODELIST"));
	const char *why = given ? NULL : "SLURM_JOB_NODELIST is not set";
	while (*nodes && !why) {
		struct dl_span node;
		uint32_t repeats;
		char name[DL_NAME_MAX + 1];
		dl_next_nodes(&nodes, &node, &repeats);
		memcpy(name, node.at, node.length);
		name[node.length] = '\0';
		if (slurm_hostlist_find(given, name) < 0)
			why = "SLURMDL_RANKMAP_NODES names a node outside the job";
	}
	slurm_hostlist_destroy(given);
	return why;
}

static void copy_env(const char *to, const char *from)
{
	const char *value = getenv(from);
	if (value)
		setenv(to, value, 1);
	else
		unsetenv(to);
}

/* Write the host file; line i is the node of rank i. Returns NULL or the reason of a failure. */
static const char *write_hostfile(const char *nodes)
{
	hostfile = memfd_create("slurmdl-hostfile", MFD_CLOEXEC);
	int copy = hostfile < 0 ? -1 : dup(hostfile);
	FILE *file = copy < 0 ? NULL : fdopen(copy, "w");
	if (!file) {
		if (copy >= 0)
			close(copy);
		return "cannot create a host file";
	}
	while (*nodes) {
		struct dl_span node;
		uint32_t repeats;
		dl_next_nodes(&nodes, &node, &repeats);
		while (repeats--)
			fprintf(file, "%.*s\n", (int)node.length, node.at);
	}
	return fclose(file) ? "no memory for a host file" : NULL;
}

static void export_number(const char *name, uint32_t value)
{
	char text[16];
	snprintf(text, sizeof(text), "%u", value);
	setenv(name, text, 1);
}

/* False if another program listens on this address. */
static bool is_free(const void *address, socklen_t length)
{
	int server = socket(((const struct sockaddr *)address)->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool taken = server >= 0 && bind(server, address, length) && errno == EADDRINUSE;
	if (server >= 0)
		close(server);
	return !taken;
}

/* A port for rank 0 that is free on this host, where rank 0 usually runs. Random, so that it cannot be occupied in
 * advance; below Linux's ephemeral ports (32768) and above those of services. */
static uint32_t draw_port(void)
{
	uint32_t port = 0;
	for (int draws = 0; draws < 100; draws++) {
		uint32_t number = 0;
		if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number))
			number = (uint32_t)getpid();
		port = 10000 + number % 22000;
		struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
		struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
		if (is_free(&six, sizeof(six)) && is_free(&four, sizeof(four)))
			break;
	}
	return port;
}

/* srun reads SLURM_HOSTFILE after its options, unless -w or -F is given (srun(1)). The step's variables are those of
 * `slurmdl srun`. */
static void export_map(const char *nodes, uint32_t size)
{
	struct dl_span first;
	char text[DL_NAME_MAX + 1];

	snprintf(text, sizeof(text), "/proc/self/fd/%d", hostfile);
	setenv("SLURM_HOSTFILE", text, 1);
	dl_node_of(nodes, 0, &first);
	snprintf(text, sizeof(text), "%.*s", (int)first.length, first.at);
	setenv("SLURMDL_MASTER_ADDR", text, 1);
	export_number("SLURMDL_MASTER_PORT", draw_port());
	export_number("SLURMDL_WORLD_SIZE", size);
	copy_env("SLURMDL_ROLE_RANKS", "SLURMDL_RANKMAP_ROLE_RANKS");
	copy_env("SLURMDL_ZONE_RANKS", "SLURMDL_RANKMAP_ZONE_RANKS");
	copy_env("SLURMDL_PLAN", "SLURMDL_RANKMAP_PLAN");
}

int dl_rank_map_apply(void)
{
	const char *nodes = getenv("SLURMDL_RANKMAP_NODES");
	const char *strict = getenv(dl_options[DL_OPT_STRICT].variable);
	uint32_t size = 0;

	unsetenv("SLURMDL_WORLD_SIZE"); /* set by an enclosing step */
	dl_rank_map_done();
	const char *why = map_of_job(nodes, &size);
	if (!why)
		why = write_hostfile(nodes);
	if (!why) {
		export_map(nodes, size);
		return 0;
	}
	dl_rank_map_done();
	map_rejected = true;
	bool fails = strict && dl_is_set(strict);
	slurm_spank_log("slurmdl: --dl-rank-map: %s%s", why, fails ? "" : "; the step runs in srun's own order");
	return fails ? -1 : 0;
}

int dl_rank_map_strict(void)
{
	if (map_rejected)
		slurm_error("slurmdl: --dl-strict: --dl-rank-map cannot be applied");
	return map_rejected ? -1 : 0;
}
