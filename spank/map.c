/* srun --dl-map: gives its step the map of the job, which is in the environment. */
#define _GNU_SOURCE
#include "core/task.h"
#include "glue.h"

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

/* the map as a file in memory, while srun reads its options */
static int hostfile = -1;
static bool refused;

/* The host file is of this step alone: its tasks may start steps of their own. */
void dl_map_done(void)
{
	if (hostfile >= 0) {
		close(hostfile);
		unsetenv("SLURM_HOSTFILE");
	}
	hostfile = -1;
	refused = false;
}

/* NULL, or why the job's map cannot be applied. */
static const char *map_of_job(const char *nodes, uint32_t *size)
{
	const char *stamp = getenv("SLURMDL_MAP_JOB"), *job = getenv("SLURM_JOB_ID");
	if (!nodes)
		return "the job has no map (SLURMDL_MAP_NODES)";
	if (!job || !stamp || strcmp(job, stamp))
		return "SLURMDL_MAP_NODES is the map of another job";
	if (dl_count_nodes(nodes, size))
		return "SLURMDL_MAP_NODES is malformed: NODE,NODE(xTASKS),... was expected";
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
			why = "SLURMDL_MAP_NODES names a node that is not of the job";
	}
	slurm_hostlist_destroy(given);
	return why;
}

static void hand_on(const char *to, const char *from)
{
	const char *value = getenv(from);
	if (value)
		setenv(to, value, 1);
	else
		unsetenv(to);
}

/* Line i is the node of rank i. NULL, or why there is no such file. */
static const char *write_hostfile(const char *nodes)
{
	hostfile = memfd_create("slurmdl-hostfile", MFD_CLOEXEC);
	int copy = hostfile < 0 ? -1 : dup(hostfile);
	FILE *file = copy < 0 ? NULL : fdopen(copy, "w");
	if (!file) {
		if (copy >= 0)
			close(copy);
		return "no host file can be made";
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

/* False where another program has this address of this host. */
static bool is_free(const void *address, socklen_t length)
{
	int server = socket(((const struct sockaddr *)address)->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	bool taken = server >= 0 && bind(server, address, length) && errno == EADDRINUSE;
	if (server >= 0)
		close(server);
	return !taken;
}

/* A port for rank 0: one that is free here, as srun most often runs on the host of rank 0. It is drawn at random, so
 * that nobody can occupy it beforehand, below the ports that Linux gives out by itself (32768) and above those of
 * services. */
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

/* srun takes a host file from SLURM_HOSTFILE, which it reads after its options, where neither -w nor -F is given
 * (srun(1)). The step's variables are those that `slurmdl srun` gives. */
static void export_map(const char *nodes, uint32_t size)
{
	struct dl_span first;
	char text[DL_NAME_MAX + 1];

	snprintf(text, sizeof(text), "/proc/self/fd/%d", hostfile);
	setenv("SLURM_HOSTFILE", text, 1);
	dl_node_of(nodes, 0, &first);
	snprintf(text, sizeof(text), "%.*s", (int)first.length, first.at);
	setenv("SLURMDL_MASTER", text, 1);
	export_number("SLURMDL_PORT", draw_port());
	export_number("SLURMDL_SIZE", size);
	hand_on("SLURMDL_PS_RANKS", "SLURMDL_MAP_PS_RANKS");
	hand_on("SLURMDL_ZONE_RANKS", "SLURMDL_MAP_ZONE_RANKS");
	hand_on("SLURMDL_PLAN", "SLURMDL_MAP_PLAN");
}

int dl_map_apply(void)
{
	const char *nodes = getenv("SLURMDL_MAP_NODES");
	const char *strict = getenv(dl_options[DL_OPT_STRICT].variable);
	uint32_t size = 0;

	unsetenv("SLURMDL_SIZE"); /* that of a step around this one */
	dl_map_done();
	const char *why = map_of_job(nodes, &size);
	if (!why)
		why = write_hostfile(nodes);
	if (!why) {
		export_map(nodes, size);
		return 0;
	}
	dl_map_done();
	refused = true;
	bool fails = strict && dl_is_set(strict);
	slurm_spank_log("slurmdl: --dl-map: %s%s", why, fails ? "" : "; the step runs in srun's own order");
	return fails ? -1 : 0;
}

int dl_map_strict(void)
{
	if (refused)
		slurm_error("slurmdl: --dl-strict: --dl-map cannot be applied");
	return refused ? -1 : 0;
}
