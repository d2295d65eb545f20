/* Ranks in the folded forms in which a map travels in the environment. Texts are read as they stand, within bounds;
 * nothing is allocated, and every reader goes through the whole text, so that what is malformed never passes. */
#ifndef SLURMDL_RANKS_H
#define SLURMDL_RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DL_TEXT_MAX (128 * 1024) /* the kernel's limit for one variable */
#define DL_RANKS_MAX 1000000
#define DL_NAME_MAX 255

enum dl_error {
	DL_OK = 0,
	DL_TOO_LONG,   /* text, name or number of ranks */
	DL_BAD_NUMBER, /* a digit was expected */
	DL_BAD_ORDER,  /* ranks do not ascend */
	DL_BAD_RANK,   /* a rank that the step has not */
	DL_BAD_NAME,   /* empty, or characters that no name has */
	DL_BAD_ITEM,   /* anything else between the separators */
};

const char *dl_error_text(enum dl_error error);

/* A stretch of text that does not end in a NUL. */
struct dl_span {
	const char *at;
	size_t length;
};

/* Where a rank stands in a list such as 0,4-5. */
struct dl_position {
	bool in;       /* it is in the list */
	uint32_t rank; /* then its index in it, else how many of the list are lower */
	uint32_t count; /* ranks in the list */
};

/* Ranks that ascend, each below size: 0,4-5. The empty list is valid. */
enum dl_error dl_find_rank(struct dl_span list, uint32_t size, uint32_t rank, struct dl_position *position);

/* The zone of a rank in leafA:0-3;leafB:4-7; of length 0 where no zone has it. */
enum dl_error dl_zone_of(const char *text, uint32_t size, uint32_t rank, struct dl_span *zone);

/* Steps through n2,n1(x2),n3, the nodes of ranks 0, 1-2 and 3. *at is the rest of the text, "" at its end. */
enum dl_error dl_next_nodes(const char **at, struct dl_span *node, uint32_t *repeats);

/* How many ranks such a text has; an empty one is malformed. */
enum dl_error dl_count_nodes(const char *text, uint32_t *size);

/* The node of a rank in it; of length 0 where the text ends before. */
enum dl_error dl_node_of(const char *text, uint32_t rank, struct dl_span *node);

bool dl_span_is(struct dl_span span, const char *text);

#endif
