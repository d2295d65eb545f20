/* Test the whole plugin without Slurm: call every callback in every context many times, with seeded random valid
 * and invalid options, environments and tasks. Mocks replace Slurm's functions as in spank.h. Each call is checked
 * against invariants, under sanitizers and valgrind. */
#define _GNU_SOURCE
#include "../core/options.h"
#include "../core/task.h"

#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

/* --- mock of Slurm --- */

#define MAX_ENV 64

struct spank_handle {
	spank_context_t context;
	uint32_t rank, size, local_size, node, step;
	int local;
	char *env[MAX_ENV];
	bool unavailable; /* spank_get_item fails, as outside a task */
};

static struct spank_handle handle;
static struct spank_option registered[DL_OPTIONS + 2];
static int options, lines;

static void must(bool condition, const char *what)
{
	if (!condition) {
		fprintf(stderr, "harness: %s\n", what);
		abort();
	}
}

static char *text(const char *from)
{
	char *copy = strdup(from);
	must(copy != NULL, "no memory");
	return copy;
}

spank_context_t spank_context(void)
{
	return handle.context;
}

const char *spank_strerror(spank_err_t error)
{
	(void)error;
	return "refused";
}

spank_err_t spank_option_register(spank_t spank, struct spank_option *option)
{
	must(spank == &handle && options < DL_OPTIONS + 1, "too many options");
	must(!strncmp(option->usage, "[slurmdl] ", 10) && !strncmp(option->name, "dl-", 3), "an option without our name");
	must(handle.context != S_CTX_SLURMD && handle.context != S_CTX_JOB_SCRIPT, "an option where there are none");
	registered[options] = *option;
	registered[options].name = registered[options].arginfo = registered[options].usage = NULL;
	options++;
	return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
	if (spank->unavailable)
		return ESPANK_NOT_TASK;
	va_list arguments;
	va_start(arguments, item);
	void *to = va_arg(arguments, void *);
	va_end(arguments);
	switch (item) {
	case S_JOB_ENV:
		*(char ***)to = spank->env;
		break;
	case S_TASK_ID:
		*(int *)to = spank->local;
		break;
	case S_TASK_GLOBAL_ID:
		*(uint32_t *)to = spank->rank;
		break;
	case S_JOB_TOTAL_TASK_COUNT:
		*(uint32_t *)to = spank->size;
		break;
	case S_JOB_LOCAL_TASK_COUNT:
		*(uint32_t *)to = spank->local_size;
		break;
	case S_JOB_NODEID:
		*(uint32_t *)to = spank->node;
		break;
	case S_JOB_STEPID:
		*(uint32_t *)to = spank->step;
		break;
	default:
		must(false, "an item that is not known here");
	}
	return ESPANK_SUCCESS;
}

static int place_of(const char *name)
{
	size_t length = strlen(name);
	int i = 0;
	while (handle.env[i] && (strncmp(handle.env[i], name, length) || handle.env[i][length] != '='))
		i++;
	return i;
}

static void put(const char *name, const char *value)
{
	int i = place_of(name);
	must(i < MAX_ENV - 1, "the environment is full");
	free(handle.env[i]);
	must(asprintf(&handle.env[i], "%s=%s", name, value) > 0, "no memory");
}

static const char *get(const char *name)
{
	const char *found = handle.env[place_of(name)];
	return found ? found + strlen(name) + 1 : NULL;
}

spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite)
{
	must(spank->context == S_CTX_REMOTE && value != NULL, "spank_setenv outside of slurmstepd");
	if (spank->env[place_of(name)] && !overwrite)
		return ESPANK_ENV_EXISTS;
	/* the value may point into the variable that is freed */
	char *copy = text(value);
	put(name, copy);
	free(copy);
	return ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t spank, const char *name)
{
	int i = place_of(name);
	must(spank->context == S_CTX_REMOTE, "spank_unsetenv outside of slurmstepd");
	if (!spank->env[i])
		return ESPANK_SUCCESS;
	free(spank->env[i]);
	for (; spank->env[i]; i++)
		spank->env[i] = spank->env[i + 1];
	return ESPANK_SUCCESS;
}

static void said(const char *format, va_list arguments)
{
	char line[2048];
	int length = vsnprintf(line, sizeof(line), format, arguments);
	must(length > 0 && (size_t)length < sizeof(line), "a line that is too long");
	must(!strncmp(line, "slurmdl: ", 9) && !strpbrk(line, "\n\r\033"), "a message that is not one line of ours");
	lines++;
}

void slurm_spank_log(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	said(format, arguments);
	va_end(arguments);
}

void slurm_error(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	said(format, arguments);
	va_end(arguments);
}

/* a hostlist_t; since Slurm 23.11 a pointer to one */
typedef __typeof__(slurm_hostlist_create("")) hostlist;

/* the harness passes only names separated by commas */
hostlist slurm_hostlist_create(const char *list)
{
	return list ? (hostlist)text(list) : NULL;
}

int slurm_hostlist_find(hostlist list, const char *name)
{
	const char *at = (const char *)list;
	size_t length = strlen(name);
	for (int i = 0; *at; i++) {
		size_t each = strcspn(at, ",");
		if (each == length && !strncmp(at, name, each))
			return i;
		at += each + (at[each] == ',');
	}
	return -1;
}

void slurm_hostlist_destroy(hostlist list)
{
	free(list);
}

/* --- random inputs --- */

static uint64_t state;

static uint32_t draw(uint32_t below)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(state >> 33) % below;
}

static char huge[DL_TEXT_MAX + 64];

static const char *const values[] = {
	"", "0", "1", "2", "3", "4", "ps", "gossip", "allreduce", "pack", "auto", "off", "zoneA,zoneB", "100M", "1e9999", "x",
	"yes", "(null)", "0,2", "0-1", "0-3,2", "5", "leafA:0-1;leafB:2-3", "leafA:0-3;", "leafA", "n1", "n1,n2(x2),n1",
	"n1(x4)", "n1,n9,n1,n2", "n1,n2", "n[1-4]", "n1\nn2", "$(reboot)", "`id`;'\"", "\033[31m\r\n", "%s%n%s%n", "10149", "70000",
	"71", "72", " RANK WORLD_SIZE", "RANK MASTER_ADDR MASTER_PORT", "core.leafA.n1", "core.leafB.n2", "n1.", ".", "arbitrary",
	"block", "/proc/self/fd/0", huge,
};

static const char *value(void)
{
	return values[draw(sizeof(values) / sizeof(*values))];
}

static const char *const names[] = {
	"SLURMDL_WORLD_SIZE", "SLURMDL_ROLE_RANKS", "SLURMDL_ZONE_RANKS", "SLURMDL_MASTER_ADDR", "SLURMDL_MASTER_PORT", "SLURMDL_PLAN", "SLURMDL_EXPORTED",
	"SLURMDL_TASK_SCRIPT", "SLURMDL_RANKMAP_JOB", "SLURMDL_RANKMAP_NODES", "SLURMDL_RANKMAP_ROLE_RANKS", "SLURMDL_RANKMAP_ZONE_RANKS",
	"SLURMDL_RANKMAP_PLAN", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_DISTRIBUTION", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
	"SLURM_ARRAY_TASK_ID", "SLURM_HOSTFILE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
	"MASTER_PORT", "SLURMDL_ROLE",
};
#define NAMES (sizeof(names) / sizeof(*names))

/* Most jobs are valid, to also reach the code after the checks. */
static const struct {
	const char *name, *value;
} right[] = {
	{"SLURMDL_WORLD_SIZE", "4"}, {"SLURMDL_ROLE_RANKS", "ps:0,2;worker:1,3;"}, {"SLURMDL_ZONE_RANKS", "leafA:0-1;leafB:2-3;"},
	{"SLURMDL_MASTER_ADDR", "n1"}, {"SLURMDL_MASTER_PORT", "10149"}, {"SLURM_DISTRIBUTION", "arbitrary"}, {"SLURMD_NODENAME", "n1"},
	{"SLURM_TOPOLOGY_ADDR", "core.leafA.n1"}, {"SLURMDL_RANKMAP_NODES", "n1,n2(x2),n1"}, {"SLURMDL_RANKMAP_JOB", "71"},
	{"SLURM_JOB_ID", "71"}, {"SLURM_JOB_NODELIST", "n1,n2,n3"}, {"SLURMDL_RANKMAP_ROLE_RANKS", "ps:0,2;worker:1,3;"},
};

static void draw_environment(void (*to)(const char *, const char *))
{
	for (size_t i = 0; i < sizeof(right) / sizeof(*right); i++)
		if (draw(8))
			to(right[i].name, right[i].value);
	for (uint32_t i = draw(4); i; i--)
		to(names[draw(NAMES)], value());
	for (uint32_t i = draw(3); i; i--)
		to(dl_options[draw(DL_OPTIONS)].variable, value());
	if (!draw(4))
		to(dl_options[draw(DL_OPTIONS)].spank_variable, value());
}

static void set_own(const char *name, const char *to)
{
	setenv(name, to, 1);
}

/* --- invariants --- */

static void check_task(bool hands_off)
{
	const char *role = get("SLURMDL_ROLE"), *index = get("SLURMDL_ROLE_RANK"), *ours = get("SLURMDL_EXPORTED");
	if (hands_off)
		return;
	must(ours && get("SLURMDL_ZONE") && get("RANK") && get("WORLD_SIZE") && get("LOCAL_RANK"), "a task without its variables");
	must(!role == !index && (!role || (uint32_t)atol(index) < handle.size), "a rank that the role has not");
	must(!role || *role, "an empty role");
	must(!strstr(ours, "MASTER_ADDR") || *get("MASTER_ADDR"), "an empty address is given as ours");
	must(!strstr(ours, "MASTER_ADDR") || get("SLURMDL_WORLD_SIZE"), "an address without a map");
	must(!strstr(ours, " RANK") || (uint32_t)atol(get("RANK")) == handle.rank, "a wrong rank");
}

static void in_a_client(void)
{
	draw_environment(set_own);
	must(slurm_spank_init(&handle, 0, NULL) == 0, "slurm_spank_init fails");
	for (uint32_t i = draw(5); i; i--) {
		int which = (int)draw((uint32_t)options);
		const char *given = value();
		int before = lines, status = registered[which].cb(registered[which].val, draw(9) ? given : NULL, 0);
		must(status == 0 || (status == -1 && lines == before + 1), "an option is refused without a word");
	}
	must(slurm_spank_init_post_opt(&handle, 0, NULL) == 0, "slurm_spank_init_post_opt fails");
	const char *file = getenv("SLURM_HOSTFILE");
	must(!file || strncmp(file, "/proc/self/fd/", 14) || !strcmp(file, "/proc/self/fd/0"), "the host file is left behind");
	for (size_t i = 0; i < NAMES; i++)
		unsetenv(names[i]);
	for (int i = 0; i < DL_OPTIONS; i++) {
		unsetenv(dl_options[i].variable);
		unsetenv(dl_options[i].spank_variable);
	}
}

static void in_slurmstepd(void)
{
	static const uint32_t steps[] = {0, 1, 999, 1000, 123456, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT, SLURM_INTERACTIVE_STEP};
	must(slurm_spank_init(&handle, 0, NULL) == 0, "slurm_spank_init fails");
	for (uint32_t i = draw(4); i; i--) {
		int which = (int)draw((uint32_t)options);
		must(registered[which].cb(registered[which].val, draw(9) ? value() : NULL, 1) == 0, "an option fails remotely");
	}
	must(slurm_spank_init_post_opt(&handle, 0, NULL) == 0, "slurm_spank_init_post_opt fails");
	handle.size = draw(8) ? 4 : draw(10);
	handle.rank = handle.size ? draw(handle.size) : draw(3);
	handle.local_size = draw(4);
	handle.local = (int)draw(3);
	handle.node = draw(6);
	handle.step = steps[draw(sizeof(steps) / sizeof(*steps))];
	handle.unavailable = !draw(20);
	draw_environment(put);
	char *task = get("SLURMDL_TASK_SCRIPT") ? text(get("SLURMDL_TASK_SCRIPT")) : NULL;
	bool asked = get("SLURMDL_EXPORTED") != NULL;
	for (int i = 0; i < DL_OPTIONS; i++)
		asked = asked || get(dl_options[i].variable);
	int before = lines;
	must(slurm_spank_task_init(&handle, 0, NULL) == 0, "slurm_spank_task_init fails");
	must(lines <= before + 1, "more than one warning");
	if (asked || get("SLURMDL_EXPORTED"))
		check_task(handle.unavailable || task || handle.step > SLURM_MAX_NORMAL_STEP_ID || handle.size == 0);
	free(task);
	for (int i = 0; handle.env[i]; i++) {
		free(handle.env[i]);
		handle.env[i] = NULL;
	}
}

int main(int argc, char **argv)
{
	static const spank_context_t contexts[] = {S_CTX_LOCAL, S_CTX_ALLOCATOR, S_CTX_REMOTE, S_CTX_SLURMD, S_CTX_JOB_SCRIPT,
						   S_CTX_ERROR};
	long rounds = argc > 1 ? atol(argv[1]) : 10000;
	int first = dup(0);
	memset(huge, '7', sizeof(huge) - 1);
	clearenv();
	for (long round = 0; round < rounds; round++) {
		for (size_t i = 0; i < sizeof(contexts) / sizeof(*contexts); i++) {
			state = (uint64_t)round * 6 + i;
			memset(&handle, 0, sizeof(handle));
			handle.context = contexts[i];
			options = 0;
			if (handle.context == S_CTX_REMOTE) {
				in_slurmstepd();
			} else if (handle.context == S_CTX_LOCAL || handle.context == S_CTX_ALLOCATOR) {
				in_a_client();
			} else {
				must(!slurm_spank_init(&handle, 0, NULL) && !slurm_spank_init_post_opt(&handle, 0, NULL) &&
					     !slurm_spank_task_init(&handle, 0, NULL) && !options,
				     "something is done where nothing is to do");
			}
		}
	}
	must(dup(0) == first + 1, "files are left open");
	printf("%ld rounds in %zu contexts, %d lines said\n", rounds, sizeof(contexts) / sizeof(*contexts), lines);
	return 0;
}
