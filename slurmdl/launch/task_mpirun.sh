# Variables of Open MPI's mpirun.
_dl_rank=$OMPI_COMM_WORLD_RANK
_dl_local_rank=$OMPI_COMM_WORLD_LOCAL_RANK _dl_local_size=$OMPI_COMM_WORLD_LOCAL_SIZE
