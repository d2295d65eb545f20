# What Open MPI's mpirun tells each task.
_dl_rank=$OMPI_COMM_WORLD_RANK
_dl_local_rank=$OMPI_COMM_WORLD_LOCAL_RANK _dl_local_size=$OMPI_COMM_WORLD_LOCAL_SIZE
