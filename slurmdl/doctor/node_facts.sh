# Facts of a compute node, as a task of the ordinary user. Each line: NODE, a tab, KEY, a tab, VALUE.
# Arguments: path of the plugin; a file in plan_dir written by the login node; either may be "".
fact() { printf '%s\t%s\t%s\n' "$SLURMD_NODENAME" "$1" "$(printf %s "$2" | tr '\n\t' '  ')"; }
checksum() { if [ -r "$1" ]; then cksum <"$1"; else echo missing; fi; }
fact clock "$(date +%s.%N)"
fact topology_addr "${SLURM_TOPOLOGY_ADDR-}"
fact pmi "${PMIX_RANK-}${PMI_RANK-}"
fact plan_dir_token "$([ -z "$2" ] || cat "$2" 2>&1)"
fact config_checksum "$(checksum /etc/slurmdl/slurmdl.yaml)"
fact plugin_checksum "$([ -z "$1" ] || checksum "$1")"
help=$(srun --help 2>&1)
fact spank_options "$(printf %s "$help" | grep -c -e --dl-)"
fact srun_error "$(printf %s "$help" | grep -m 1 -e error: -e Incompatible)"
fact srun_version "$(srun -V 2>&1)"
fact slurmdl "$(slurmdl --version 2>&1 | tail -n 1)"
