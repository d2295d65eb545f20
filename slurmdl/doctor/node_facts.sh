# What a compute node tells of itself, as a task of the ordinary user: NODE, a tab, KEY, a tab, VALUE on each line.
# Arguments: the plugin's file, and a file in plan_dir that the login node has just written; either may be "".
say() { printf '%s\t%s\t%s\n' "$SLURMD_NODENAME" "$1" "$(printf %s "$2" | tr '\n\t' '  ')"; }
mark() { if [ -r "$1" ]; then cksum <"$1"; else echo missing; fi; }
say clock "$(date +%s.%N)"
say zone "${SLURM_TOPOLOGY_ADDR-}"
say pmi "${PMIX_RANK-}${PMI_RANK-}"
say shared "$([ -z "$2" ] || cat "$2" 2>&1)"
say site "$(mark /etc/slurmdl/slurmdl.yaml)"
say plugin "$([ -z "$1" ] || mark "$1")"
help=$(srun --help 2>&1)
say options "$(printf %s "$help" | grep -c -e --dl-)"
say fault "$(printf %s "$help" | grep -m 1 -e error: -e Incompatible)"
say release "$(srun -V 2>&1)"
say slurmdl "$(slurmdl --version 2>&1 | tail -n 1)"
