/* Command line of the core, for tests that compare it with Python. Each input line is a request with fields separated
 * by tabs: option NAME VALUE; role SIZE RANK ROLE_RANKS ZONE_RANKS; nodes RANK TEXT. The answer is one line. */
#define _GNU_SOURCE
#include "../core/options.h"
#include "../core/task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELDS 6

static void option(char **field)
{
	char message[DL_MESSAGE], source[64];
	for (int i = 0; i < DL_OPTIONS; i++) {
		snprintf(source, sizeof(source), "--%s", dl_options[i].name);
		if (!strcmp(dl_options[i].name, field[1]))
			puts(dl_option_check(&dl_options[i], field[2], source, message) ? "valid" : message);
	}
}

static void role(char **field)
{
	struct dl_task task = {.size = (uint32_t)atol(field[1]), .rank = (uint32_t)atol(field[2]), .mapped = true,
			       .map_size = field[1], .role_ranks = field[3], .zone_ranks = field[4], .master = "m", .port = "1",
			       .distribution = "arbitrary"};
	struct dl_task_env env;
	dl_task_env_fill(&task, &env);
	if (env.mapped)
		printf("%s %u %s\n", env.role, env.role_rank, env.zone);
	else
		puts(env.warning);
}

int main(void)
{
	static char line[2 * DL_TEXT_MAX];
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof(line), stdin)) {
		char *rest = line, *field[FIELDS] = {"", "", "", "", "", ""};
		line[strcspn(line, "\n")] = '\0';
		for (int i = 0; i < FIELDS && rest; i++)
			field[i] = strsep(&rest, "\t");
		if (!strcmp(field[0], "option")) {
			option(field);
		} else if (!strcmp(field[0], "role")) {
			role(field);
		} else {
			struct dl_span node;
			enum dl_error error = dl_node_of(field[2], (uint32_t)atol(field[1]), &node);
			printf("%s %.*s\n", error ? "malformed" : "node", (int)node.length, node.at);
		}
	}
	return 0;
}
