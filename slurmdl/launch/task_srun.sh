# Variables of srun. A step started inside a task must not inherit --distribution=arbitrary.
unset SLURM_DISTRIBUTION
# the step's --job-name must not change the job's name
[ -n "$SLURMDL_JOB_NAME" ] && SLURM_JOB_NAME=$SLURMDL_JOB_NAME
unset SLURMDL_JOB_NAME
_dl_rank=$SLURM_PROCID _dl_local_rank=$SLURM_LOCALID
# tasks per node are folded, for example 2(x3),1
_dl_at=$SLURM_NODEID _dl_list=$SLURM_STEP_TASKS_PER_NODE,
while [ -n "$_dl_list" ]; do
    _dl_part=${_dl_list%%,*} _dl_list=${_dl_list#*,}
    _dl_local_size=${_dl_part%%\(*} _dl_high=1
    case $_dl_part in *x*) _dl_high=${_dl_part#*x} _dl_high=${_dl_high%\)} ;; esac
    [ "$_dl_at" -lt "$_dl_high" ] && break
    _dl_at=$((_dl_at - _dl_high))
done
