# Variables of srun.
# the step's --job-name must not change the job's name
[ -n "$SLURMDL_JOB_NAME" ] && SLURM_JOB_NAME=$SLURMDL_JOB_NAME
unset SLURMDL_JOB_NAME
# the first rank of the task
_dl_rank=$((SLURM_PROCID * ${SLURMDL_RANKS_PER_TASK:-1})) _dl_local_rank=$SLURM_LOCALID
# tasks per node are folded, for example 2(x3),1
_dl_at=$SLURM_NODEID _dl_list=$SLURM_STEP_TASKS_PER_NODE,
while [ -n "$_dl_list" ]; do
    _dl_part=${_dl_list%%,*} _dl_list=${_dl_list#*,}
    _dl_local_size=${_dl_part%%\(*} _dl_high=1
    case $_dl_part in *x*) _dl_high=${_dl_part#*x} _dl_high=${_dl_high%\)} ;; esac
    [ "$_dl_at" -lt "$_dl_high" ] && break
    _dl_at=$((_dl_at - _dl_high))
done
if [ -n "$SLURMDL_PLAN" ]; then
    # a step started inside a task must not inherit --distribution=arbitrary
    unset SLURM_DISTRIBUTION
    # With one task per node Slurm's node rank equals the task's rank. --distribution=arbitrary, which numbers the nodes
    # by name, breaks that, and launch scripts rely on it.
    [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] && SLURM_NODEID=$SLURM_PROCID
else
    # srun's own order: rank 0 is on the first node of a list such as n[03-05,7]x[1-2],m1
    SLURMDL_WORLD_SIZE=$SLURM_STEP_NUM_TASKS SLURMDL_MASTER_ADDR= _dl_list=$SLURM_STEP_NODELIST
    while [ -n "$_dl_list" ]; do
        _dl_part=${_dl_list%%[[,]*}
        SLURMDL_MASTER_ADDR=$SLURMDL_MASTER_ADDR$_dl_part _dl_list=${_dl_list#"$_dl_part"}
        case $_dl_list in "["*) ;; *) break ;; esac
        _dl_list=${_dl_list#?}
        SLURMDL_MASTER_ADDR=$SLURMDL_MASTER_ADDR${_dl_list%%[],-]*} _dl_list=${_dl_list#*"]"}
    done
fi
