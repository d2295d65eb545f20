/* Unit tests of the core; a failed check prints the expression and the actual value. */
#include "../core/options.h"
#include "../core/task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures, checks;

#define CHECK(condition, ...)                                              \
	do {                                                               \
		checks++;                                                  \
		if (!(condition)) {                                        \
			failures++;                                        \
			printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
			printf(__VA_ARGS__);                               \
			putchar('\n');                                     \
		}                                                          \
	} while (0)

static void options(void)
{
	static const struct {
		int option;
		const char *value;
		bool valid;
	} cases[] = {
		{DL_OPT_STRATEGY, "ps", true}, {DL_OPT_STRATEGY, "adaptive-gossip", true},
		{DL_OPT_STRATEGY, "local-sgd", true}, {DL_OPT_STRATEGY, "local", false}, {DL_OPT_STRATEGY, "elastic", false},
		{DL_OPT_STRATEGY, "", false}, {DL_OPT_STRATEGY, "gossi", false}, {DL_OPT_STRATEGY, "gossip|ps", false},
		{DL_OPT_STRATEGY, "PS", false}, {DL_OPT_STRATEGY, "ps ", false}, {DL_OPT_STRATEGY, "|", false},
		{DL_OPT_PS, "0", true}, {DL_OPT_PS, "999999999", true}, {DL_OPT_PS, "007", true},
		{DL_OPT_PS, "1000000000", false}, {DL_OPT_PS, "-1", false}, {DL_OPT_PS, "+1", false},
		{DL_OPT_PS, " 1", false}, {DL_OPT_PS, "1x", false}, {DL_OPT_PS, "", false},
		{DL_OPT_ZONE, "a,b", true}, {DL_OPT_ZONE, ",a", true}, {DL_OPT_ZONE, ",,", false}, {DL_OPT_ZONE, "", false},
		{DL_OPT_LINK_SCORES, "any text\n", true}, {DL_OPT_LINK_SCORES, "", false}, {DL_OPT_STRICT, "whatever", true},
	};
	char message[DL_MESSAGE];
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
		CHECK(dl_option_check(&dl_options[cases[i].option], cases[i].value, "x", message) == cases[i].valid,
		      "%s=%s", dl_options[cases[i].option].name, cases[i].value);

	dl_option_check(&dl_options[DL_OPT_NODE_BINDING], "\033[31mx\n", "--dl-node-binding", message);
	CHECK(!strcmp(message, "--dl-node-binding: invalid value '?[31mx?'; expected auto, nodelist, zone, late, off"), "%s", message);

	static char longest[DL_VALUE_MAX + 2];
	memset(longest, '1', sizeof(longest) - 1);
	for (int i = 0; i < DL_OPTIONS; i++)
		CHECK(dl_options[i].kind == DL_FLAG || !dl_option_check(&dl_options[i], longest, "x", message), "%s",
		      dl_options[i].name);
	longest[DL_VALUE_MAX] = '\0';
	CHECK(dl_option_check(&dl_options[DL_OPT_LINK_SCORES], longest, "x", message), "%s", message);

	static const char *const on[] = {"", "yes", "1", "007", "-1", "+2"}, *const off[] = {"0", "no", "00", "x", "Yes", "1x"};
	for (int i = 0; i < 6; i++) {
		CHECK(dl_is_set(on[i]), "%s", on[i]);
		CHECK(!dl_is_set(off[i]), "%s", off[i]);
	}
}

static void lists(void)
{
	static const struct {
		const char *list;
		uint32_t rank;
		enum dl_error error;
		bool in;
		uint32_t index, count;
	} cases[] = {
		{"", 3, DL_OK, false, 0, 0}, {"0", 0, DL_OK, true, 0, 1}, {"0,4-5", 0, DL_OK, true, 0, 3},
		{"0,4-5", 3, DL_OK, false, 1, 3}, {"0,4-5", 5, DL_OK, true, 2, 3}, {"0,4-5", 9, DL_OK, false, 3, 3},
		{"0-9", 9, DL_OK, true, 9, 10}, {"3-3", 3, DL_OK, true, 0, 1}, {"00,01", 1, DL_OK, true, 1, 2},
		{"10", 0, DL_BAD_RANK, false, 0, 0}, {"0-10", 0, DL_BAD_RANK, false, 0, 0},
		{"5-4", 0, DL_BAD_ORDER, false, 0, 0}, {"4,4", 0, DL_BAD_ORDER, false, 0, 0},
		{"0-3,2", 0, DL_BAD_ORDER, false, 0, 0}, {"2,1", 0, DL_BAD_ORDER, false, 0, 0},
		{",", 0, DL_BAD_NUMBER, false, 0, 0}, {"1,", 0, DL_BAD_ITEM, false, 0, 0}, {"1,,2", 0, DL_BAD_NUMBER, false, 0, 0},
		{"a", 0, DL_BAD_NUMBER, false, 0, 0}, {"1-", 0, DL_BAD_NUMBER, false, 0, 0}, {"-1", 0, DL_BAD_NUMBER, false, 0, 0},
		{"1-2-3", 0, DL_BAD_ITEM, false, 0, 0}, {"1 2", 0, DL_BAD_ITEM, false, 0, 0},
		{"1234567890", 0, DL_TOO_LONG, false, 0, 0}, {"0-4294967296", 0, DL_TOO_LONG, false, 0, 0},
		{"$(reboot)", 0, DL_BAD_NUMBER, false, 0, 0},
	};
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct dl_position found;
		struct dl_span list = {cases[i].list, strlen(cases[i].list)};
		enum dl_error error = dl_find_rank(list, 10, cases[i].rank, &found);
		CHECK(error == cases[i].error, "'%s': %s", cases[i].list, dl_error_text(error));
		CHECK(error || (found.in == cases[i].in && found.rank == cases[i].index && found.count == cases[i].count),
		      "'%s' %u: %d %u %u", cases[i].list, cases[i].rank, found.in, found.rank, found.count);
	}
	static char longest[DL_TEXT_MAX + 1];
	memset(longest, '0', sizeof(longest));
	struct dl_position found;
	CHECK(dl_find_rank((struct dl_span){longest, sizeof(longest)}, 10, 0, &found) == DL_TOO_LONG, "accepted");
}

static void zones(void)
{
	static const struct {
		const char *text;
		uint32_t rank;
		enum dl_error error;
		const char *zone;
	} cases[] = {
		{"", 0, DL_OK, ""}, {"A:0-3;B:4-7", 3, DL_OK, "A"}, {"A:0-3;B:4-7;", 4, DL_OK, "B"},
		{"A:0-3;B:4-7", 8, DL_OK, ""}, {"A:0;B:0", 0, DL_OK, "A"}, {"A:", 0, DL_OK, ""},
		{"A", 0, DL_BAD_ITEM, ""}, {"A;B:0", 0, DL_BAD_ITEM, ""}, {":0", 0, DL_BAD_NAME, ""}, {";", 0, DL_BAD_ITEM, ""},
		{"A:0;;", 0, DL_BAD_ITEM, ""}, {"A:x", 0, DL_BAD_NUMBER, ""}, {"A:0;B:99", 0, DL_BAD_RANK, ""},
		{"A:B:0", 0, DL_BAD_NUMBER, ""},
	};
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct dl_span zone;
		uint32_t index;
		enum dl_error error = dl_name_of(cases[i].text, 10, cases[i].rank, &zone, &index);
		CHECK(error == cases[i].error, "'%s': %s", cases[i].text, dl_error_text(error));
		CHECK(error || dl_span_is(zone, cases[i].zone), "'%s' %u: %.*s", cases[i].text, cases[i].rank,
		      (int)zone.length, zone.at);
	}
	static char longest[DL_TEXT_MAX + 2];
	struct dl_span zone;
	uint32_t index;
	CHECK(!dl_name_of("A:0,2;B:1,3-7;", 10, 5, &zone, &index) && index == 3, "index %u in B", index);
	memset(longest, 'a', sizeof(longest) - 1);
	CHECK(dl_name_of(longest, 10, 0, &zone, &index) == DL_TOO_LONG, "accepted");
	strcpy(longest + DL_NAME_MAX + 1, ":0");
	CHECK(dl_name_of(longest, 10, 0, &zone, &index) == DL_TOO_LONG, "a name of 256 characters is accepted");
	CHECK(dl_name_of(longest + 1, 10, 0, &zone, &index) == DL_OK, "a name of 255 characters is not accepted");
}

static void nodes(void)
{
	static const struct {
		const char *text;
		enum dl_error error;
		uint32_t size, rank;
		const char *node;
	} cases[] = {
		{"n1", DL_OK, 1, 0, "n1"}, {"n2,n1(x2),n3", DL_OK, 4, 2, "n1"}, {"n2,n1(x2),n3", DL_OK, 4, 3, "n3"},
		{"n1", DL_OK, 1, 1, ""}, {"a.b-c_1(x1000000)", DL_OK, 1000000, 999999, "a.b-c_1"},
		{"", DL_BAD_NAME, 0, 0, ""}, {",n1", DL_BAD_NAME, 0, 0, ""}, {"n1,", DL_BAD_ITEM, 0, 0, ""},
		{"n1,,n2", DL_BAD_NAME, 0, 0, ""}, {"n1(2)", DL_BAD_ITEM, 0, 0, ""}, {"n1(x)", DL_BAD_NUMBER, 0, 0, ""},
		{"n1(x0)", DL_BAD_ITEM, 0, 0, ""}, {"n1(x2", DL_BAD_ITEM, 0, 0, ""}, {"n1(x2)n2", DL_BAD_ITEM, 0, 0, ""},
		{"n1(x1000001)", DL_TOO_LONG, 0, 0, ""}, {"n1(x999999),n2(x2)", DL_TOO_LONG, 0, 0, ""},
		{"n1(x99999999999)", DL_TOO_LONG, 0, 0, ""}, {"n[1-2]", DL_BAD_ITEM, 0, 0, ""}, {"n1\nn2", DL_BAD_ITEM, 0, 0, ""},
		{"n1 n2", DL_BAD_ITEM, 0, 0, ""}, {"$(id)", DL_BAD_NAME, 0, 0, ""}, {"/etc/passwd", DL_BAD_NAME, 0, 0, ""},
		{"n1;n2", DL_BAD_ITEM, 0, 0, ""}, {"'n1'", DL_BAD_NAME, 0, 0, ""},
	};
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct dl_span node;
		uint32_t size;
		enum dl_error error = dl_count_nodes(cases[i].text, &size);
		CHECK(error == cases[i].error, "'%s': %s", cases[i].text, dl_error_text(error));
		CHECK(error || size == cases[i].size, "'%s': %u", cases[i].text, size);
		CHECK(dl_node_of(cases[i].text, cases[i].rank, &node) == error, "'%s': another error", cases[i].text);
		CHECK(error || dl_span_is(node, cases[i].node), "'%s' %u: %.*s", cases[i].text, cases[i].rank,
		      (int)node.length, node.at);
	}
}

/* Return a valid mapped task; each case changes one field. */
static struct dl_task mapped(void)
{
	return (struct dl_task){.rank = 4, .size = 6, .step = 1003, .mapped = true, .map_size = "6", .role_ranks = "ps:0,3;worker:1-2,4-5;",
				.zone_ranks = "A:0-2;B:3-5;", .master = "n3", .port = "10149", .nodes = "n3(x2),n1,n4,n2(x2)",
				.node = "n2", .address = "core.B.n2", .distribution = "arbitrary"};
}

static void tasks(void)
{
	struct dl_task_env env;
	struct dl_task task = mapped();
	dl_task_env_fill(&task, &env);
	CHECK(env.mapped && !strcmp(env.role, "worker") && env.role_rank == 2 && !strcmp(env.zone, "B") &&
		      !strcmp(env.master, "n3") && env.port == 10149 && !env.warning[0],
	      "%d %s %u %s %s %u %s", env.mapped, env.role, env.role_rank, env.zone, env.master, env.port, env.warning);
	task.rank = 3, task.nodes = NULL, task.role_ranks = "ps:0,3;worker:1-2,4-5;", task.step = 0;
	dl_task_env_fill(&task, &env);
	CHECK(!strcmp(env.role, "ps") && env.role_rank == 1 && env.port == 10149 && !env.warning[0], "%s %u %s", env.role,
	      env.role_rank, env.warning);
	task.role_ranks = NULL;
	dl_task_env_fill(&task, &env);
	CHECK(!strcmp(env.role, "worker") && env.role_rank == 3, "%s %u", env.role, env.role_rank);

	task.strategy = "ps", task.rank = 0, task.zone_ranks = NULL; /* derive missing values as without a map */
	dl_task_env_fill(&task, &env);
	CHECK(env.mapped && !strcmp(env.role, "ps") && !strcmp(env.zone, "B") && !env.warning[0], "%s %s %s", env.role,
	      env.zone, env.warning);

	task = mapped();
	task.groups = "a=2,b=1", task.role_ranks = "a:0-3;b:4-5;";
	dl_task_env_fill(&task, &env);
	CHECK(!strcmp(env.role, "b") && env.role_rank == 0, "%s %u", env.role, env.role_rank);
	task.map_size = "7"; /* the map does not apply */
	dl_task_env_fill(&task, &env);
	CHECK(!env.mapped && !env.role[0], "%s", env.role);

	struct dl_task wrong[10];
	for (int i = 0; i < 10; i++)
		wrong[i] = mapped();
	wrong[0].map_size = "5";
	wrong[1].map_size = "x";
	wrong[2].role_ranks = "ps:6;";
	wrong[3].zone_ranks = "A";
	wrong[4].master = NULL;
	wrong[5].port = "70000";
	wrong[6].port = NULL;
	wrong[7].nodes = "n3(x";
	wrong[8].distribution = "block";
	wrong[9].map_size = "7";
	for (int i = 0; i < 10; i++) {
		dl_task_env_fill(&wrong[i], &env);
		CHECK(!env.mapped && env.warning[0] && !env.node_specific, "case %d: %s", i, env.warning);
		CHECK(!strcmp(env.role, "worker") && env.role_rank == 4 && !strcmp(env.zone, "B") && !env.master[0],
		      "case %d: %s %u %s %s", i, env.role, env.role_rank, env.zone, env.master);
	}

	task = mapped();
	task.node = "n9", task.address = NULL;
	dl_task_env_fill(&task, &env);
	CHECK(env.mapped && env.node_specific && !strcmp(env.warning, "rank 4 is on n9, but on n2 in the map"), "%s", env.warning);
	task = mapped();
	task.address = "core.xB.n2";
	dl_task_env_fill(&task, &env);
	CHECK(env.mapped && env.node_specific && !strcmp(env.warning, "rank 4 is in core.xB, but in zone B in the map"), "%s",
	      env.warning);
	task.address = "n2"; /* the cluster has no zones */
	dl_task_env_fill(&task, &env);
	CHECK(env.mapped && !env.warning[0], "%s", env.warning);
}

static void roles_without_a_map(void)
{
	static const struct {
		const char *strategy, *servers;
		uint32_t rank;
		const char *role;
		uint32_t role_rank;
	} cases[] = {
		{NULL, NULL, 2, "worker", 2}, {"ps", NULL, 0, "ps", 0}, {"ps", NULL, 1, "worker", 0}, {NULL, "2", 1, "ps", 1},
		{NULL, "2", 2, "worker", 0}, {"ps", "0", 0, "worker", 0}, {"gossip", "2", 0, "worker", 0},
		{NULL, "0", 0, "worker", 0}, {"ps", "3", 3, "worker", 0}, {"ps", "4", 0, NULL, 0}, {NULL, "999999999", 0, NULL, 0},
	};
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct dl_task task = {.rank = cases[i].rank, .size = 4, .strategy = cases[i].strategy,
				       .servers = cases[i].servers, .node = "n1", .address = "core.A.n1"};
		struct dl_task_env env;
		dl_task_env_fill(&task, &env);
		CHECK(!strcmp(env.role, cases[i].role ? cases[i].role : ""), "case %zu: %s", i, env.role);
		CHECK(env.role_rank == cases[i].role_rank, "case %zu: %u", i, env.role_rank);
		CHECK(!cases[i].role == !!env.warning[0], "case %zu: %s", i, env.warning);
		CHECK(!strcmp(env.zone, "A") && !env.mapped, "case %zu: %s", i, env.zone);
	}
}

int main(void)
{
	options();
	lists();
	zones();
	nodes();
	tasks();
	roles_without_a_map();
	printf("%d checks, %d failed\n", checks, failures);
	return failures != 0;
}
