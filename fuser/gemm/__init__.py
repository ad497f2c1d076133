"""Matrix products of linear layers: unquantized with PyTorch, and native quantized GEMMs."""

from fuser.gemm.matmul import architecture as architecture
from fuser.gemm.matmul import dgrad as dgrad
from fuser.gemm.matmul import linear as linear
from fuser.gemm.matmul import linear_add as linear_add
from fuser.gemm.matmul import linear_gelu as linear_gelu
from fuser.gemm.matmul import quantized_dgrad as quantized_dgrad
from fuser.gemm.matmul import quantized_linear as quantized_linear
from fuser.gemm.matmul import quantized_wgrad as quantized_wgrad
from fuser.gemm.matmul import quantized_wgrad_accumulate as quantized_wgrad_accumulate
from fuser.gemm.matmul import scaled_linear as scaled_linear
from fuser.gemm.matmul import wgrad as wgrad
from fuser.gemm.matmul import wgrad_accumulate as wgrad_accumulate
from fuser.gemm.native import NativeGemm as NativeGemm
from fuser.gemm.native import native_gemm as native_gemm
