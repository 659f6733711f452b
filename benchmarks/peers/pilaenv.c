/* The algorithmic block of PBLAS: the depth of the panels that its pdgemm multiplies. ScaLAPACK has it
   compiled in as 32, which starves a present-day BLAS; its users' guide leaves the function to the site. */
int algorithmic_block = 32;

int pilaenv_(int *context, char *precision)
{
    (void)context;
    (void)precision;
    return algorithmic_block;
}
