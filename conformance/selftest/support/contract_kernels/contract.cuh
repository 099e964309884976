// Three small kernels for the contract of the port (port_contract.py says what they mean in numpy).

extern "C" __global__ void contract_fill(float* y, long long n, float first, int step) {
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = first + (float)(i * step);
}

extern "C" __global__ void contract_add(const float* x, float* y, int n, float by) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = y[i] + by * x[i];
}

// One block, which turns the order round in shared memory.
extern "C" __global__ void contract_turn(const int* x, int* y, int n) {
    extern __shared__ int held[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = held[n - 1 - i];
}
