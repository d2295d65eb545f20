/* Fuzz one parser with libFuzzer, and check its results: -DPARSER=option, list, zones, nodes or task. */
#define _GNU_SOURCE
#include "../core/options.h"
#include "../core/task.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool condition)
{
	if (!condition)
		abort();
}

/* The first byte selects the option. */
static __attribute__((unused)) void fuzz_option(const char *text)
{
	char message[DL_MESSAGE] = "";
	const struct dl_option *option = &dl_options[(unsigned char)*text % DL_OPTIONS];
	bool valid = dl_option_check(option, *text ? text + 1 : text, "--x", message);
	must(valid != (message[0] != '\0') && strlen(message) < DL_MESSAGE && !strpbrk(message, "\n\033"));
	dl_is_set(text);
}

static __attribute__((unused)) void fuzz_list(const char *text)
{
	uint32_t size = 64, found = 0, workers = 0;
	for (uint32_t rank = 0; rank < size; rank++) {
		struct dl_position position;
		if (dl_find_rank((struct dl_span){text, strlen(text)}, size, rank, &position))
			return;
		must(position.rank == found);
		must(position.count <= size);
		found += position.in;
		workers += !position.in;
		must(rank + 1 < size || found == position.count);
	}
	must(found + workers == size);
}

static __attribute__((unused)) void fuzz_zones(const char *text)
{
	struct dl_span zone;
	uint32_t index;
	for (uint32_t rank = 0; rank < 8; rank++)
		if (!dl_name_of(text, 64, rank, &zone, &index))
			must(zone.length <= DL_NAME_MAX && !memchr(zone.at, ':', zone.length) && index <= rank);
}

static __attribute__((unused)) void fuzz_nodes(const char *text)
{
	struct dl_span node;
	uint32_t size;
	if (dl_count_nodes(text, &size))
		return;
	must(size > 0 && size <= DL_RANKS_MAX);
	must(!dl_node_of(text, size - 1, &node) && node.length > 0 && node.length <= DL_NAME_MAX);
	must(!dl_node_of(text, size, &node) && node.length == 0);
}

/* Newlines separate the fields, in the order of struct dl_task; an empty field is an unset variable. */
static __attribute__((unused)) void fuzz_task(const char *text)
{
	char copy[4096], *rest = copy, *field[10] = {NULL};
	strncpy(copy, text, sizeof(copy) - 1);
	copy[sizeof(copy) - 1] = '\0';
	for (int i = 0; i < 10 && rest; i++) {
		field[i] = strsep(&rest, "\n");
		if (!*field[i])
			field[i] = NULL;
	}
	for (uint32_t rank = 0; rank < 4; rank++) {
		struct dl_task task = {.rank = rank, .size = 4, .step = rank * 7919, .mapped = true, .strategy = field[0],
				       .servers = field[1], .map_size = "4", .role_ranks = field[2], .zone_ranks = field[3],
				       .master = field[4], .port = field[5], .nodes = field[6], .node = field[7],
				       .address = field[8], .distribution = field[9] ? "block" : "arbitrary"};
		struct dl_task_env env;
		dl_task_env_fill(&task, &env);
		must(!env.role[0] || env.role_rank < 4);
		must(!env.mapped || (env.master[0] && env.port < 65536));
		must(env.mapped || !env.master[0]);
	}
}

#define CALL(parser) CALL_(parser)
#define CALL_(parser) fuzz_##parser

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *text = malloc(size + 1);
	if (!text)
		return 0;
	memcpy(text, data, size);
	text[size] = '\0';
	CALL(PARSER)(text);
	free(text);
	return 0;
}
