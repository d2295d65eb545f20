# Sets the variables that differ per task, then executes the task's program. POSIX sh, starts no process but the check of
# the ranks that a launcher starts.
# All names of its own begin with _dl_ and are unset at the end.
# Input: _dl_rank, _dl_local_rank and _dl_local_size, from the launcher's variables.

# _dl_position LIST: _dl_at = index of the rank in a folded list such as 0,4-5, empty if it is not in the list
_dl_position() {
    _dl_at= _dl_before=0 _dl_list=${1:+$1,}
    while [ -n "$_dl_list" ]; do
        _dl_part=${_dl_list%%,*} _dl_list=${_dl_list#*,}
        _dl_low=${_dl_part%-*} _dl_high=${_dl_part#*-}
        [ "$_dl_rank" -lt "$_dl_low" ] && return
        if [ "$_dl_rank" -le "$_dl_high" ]; then
            _dl_at=$((_dl_before + _dl_rank - _dl_low))
            return
        fi
        _dl_before=$((_dl_before + _dl_high - _dl_low + 1))
    done
}

# _dl_find TEXT: _dl_name = the name whose list has the rank, in a text such as A:0-3;B:4,6; and _dl_at = its index there
_dl_find() {
    _dl_name= _dl_lists=$1
    while [ -z "$_dl_name" ] && [ -n "$_dl_lists" ]; do
        _dl_part=${_dl_lists%%;*} _dl_lists=${_dl_lists#*;} _dl_next=${_dl_part%%:*}
        _dl_position "${_dl_part#*:}"
        [ -n "$_dl_at" ] && _dl_name=$_dl_next
    done
}

# a step in srun's own order has no plan; there roles are set by the SPANK plugin
if [ -n "$SLURMDL_PLAN" ]; then
    _dl_find "$SLURMDL_ROLE_RANKS"
    SLURMDL_ROLE=$_dl_name SLURMDL_ROLE_RANK=$_dl_at
    _dl_find "$SLURMDL_ZONE_RANKS"
    SLURMDL_ZONE=$_dl_name SLURMDL_EXPORTED=
    export SLURMDL_ROLE SLURMDL_ROLE_RANK SLURMDL_ZONE
fi

# SLURMDL_EXPORTED names the variables set here, so that a launch inside this task does not take them for the user's
# _dl_default NAME VALUE: export a variable that the user has not set
_dl_default() {
    eval "[ -n \"\${$1+set}\" ]" && return
    # a single task in srun's own order may be a script that starts steps, which must not inherit its rank
    [ -z "$SLURMDL_PLAN" ] && [ "$SLURMDL_WORLD_SIZE" = 1 ] && return
    eval "$1=\$2"
    SLURMDL_EXPORTED="$SLURMDL_EXPORTED $1"
    export "$1" SLURMDL_EXPORTED
}
if [ -z "$SLURMDL_RANKS_PER_TASK" ]; then
    _dl_default RANK "$_dl_rank"
    _dl_default WORLD_SIZE "$SLURMDL_WORLD_SIZE"
    _dl_default LOCAL_RANK "$_dl_local_rank"
    _dl_default LOCAL_WORLD_SIZE "$_dl_local_size"
fi
_dl_default MASTER_ADDR "$SLURMDL_MASTER_ADDR"
_dl_default MASTER_PORT "$SLURMDL_MASTER_PORT"
if [ "$SLURMDL_LAUNCHER" = torchrun ]; then
    _dl_default PET_NODE_RANK "$SLURM_PROCID"
    _dl_default PET_MASTER_ADDR "$MASTER_ADDR"
    _dl_default PET_MASTER_PORT "$MASTER_PORT"
fi
# a c10d rendezvous in a program that could not be read sorts the nodes by PET_LOCAL_ADDR. The program may also start
# worlds of some of the nodes, and the text of any node may be the address of rank 0 there; so it is the address of the
# node, on all but rank 0's as IPv6 text, which begins with a colon (sorts behind digits) and has as many zeros and
# capital letters as needed: ::0000:0000:0000:0000:FFFf:10.0.0.2 of task 1 to ::0:0:0:0:ffff:10.0.0.9 of task 4095
_dl_sortable_address() {
    shift "$SLURM_PROCID"
    _dl_text=$1
    [ "$SLURM_PROCID" = 0 ] && return
    _dl_text=:
    for _dl_at in 1024 256 64 16; do
        case $((SLURM_PROCID / _dl_at % 4)) in
            0) _dl_text=$_dl_text:0000 ;;
            1) _dl_text=$_dl_text:000 ;;
            2) _dl_text=$_dl_text:00 ;;
            3) _dl_text=$_dl_text:0 ;;
        esac
    done
    _dl_text=$_dl_text:
    for _dl_at in 8 4 2 1; do
        [ $((SLURM_PROCID / _dl_at % 2)) = 0 ] && _dl_text=${_dl_text}F || _dl_text=${_dl_text}f
    done
    _dl_text=$_dl_text:$1
}
# without IPv6 the node is numbered by its name, and the check of the ranks says so
if [ -n "$_dl_addresses" ] && { [ "$SLURM_PROCID" = 0 ] || [ -e /proc/net/if_inet6 ]; }; then
    _dl_sortable_address $_dl_addresses
    _dl_default PET_LOCAL_ADDR "$_dl_text"
fi
case $SLURMDL_LAUNCHER in
    torchrun | accelerate)
        # a c10d rendezvous sorts the nodes by this text, and only that of rank 0 is used as an address
        if [ "$SLURM_PROCID" = 0 ]; then
            _dl_default PET_LOCAL_ADDR "$SLURMDL_MASTER_ADDR"
        else
            _dl_default PET_LOCAL_ADDR "~$((1000000 + SLURM_PROCID))-$SLURMD_NODENAME"
        fi
esac

unset -f _dl_position _dl_find _dl_default _dl_sortable_address
unset _dl_addresses _dl_text _dl_rank _dl_local_rank _dl_local_size _dl_at _dl_before _dl_list _dl_part _dl_low _dl_high _dl_name _dl_lists _dl_next
unset SLURMDL_TASK_SCRIPT SLURMDL_UNMAPPED_TASK_SCRIPT
if [ -n "$SLURMDL_VERIFY_SCRIPT" ]; then
    # detached; $$ is the process ID of the program, too; a container may lack this Python
    [ -x "$SLURMDL_VERIFY_PYTHON" ] && ("$SLURMDL_VERIFY_PYTHON" -I "$SLURMDL_VERIFY_SCRIPT" $$ </dev/null >/dev/null &)
    unset SLURMDL_VERIFY_PYTHON SLURMDL_VERIFY_SCRIPT SLURMDL_VERIFY_RANKS
fi
# if the program is missing, the exit status is that of srun: the errno of execve
case $1 in
    */*) [ -x "$1" ] ;;
    *) command -v "$1" >/dev/null ;;
esac || {
    [ -e "$1" ] && echo "slurmdl: $1: Permission denied" >&2 && exit 13
    echo "slurmdl: $1: No such file or directory" >&2
    exit 2
}
exec "$@"
