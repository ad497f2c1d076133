"""Names and arguments of Transformer Engine 2.11.0, by its import paths: facts of its release.

``*`` comes before arguments that are given by keyword alone.
"""

from __future__ import annotations

VERSION = "2.11.0"

MODULES = (
    "common common.recipe pytorch pytorch.attention pytorch.attention.dot_product_attention "
    "pytorch.attention.dot_product_attention.backends "
    "pytorch.attention.dot_product_attention.context_parallel "
    "pytorch.attention.dot_product_attention.dot_product_attention "
    "pytorch.attention.dot_product_attention.softmax "
    "pytorch.attention.dot_product_attention.utils pytorch.attention.inference "
    "pytorch.attention.multi_head_attention pytorch.attention.rope pytorch.constants "
    "pytorch.cpp_extensions pytorch.cpp_extensions.fused_attn pytorch.cpp_extensions.gemm "
    "pytorch.cpu_offload pytorch.cpu_offload_v1 pytorch.cross_entropy pytorch.custom_recipes "
    "pytorch.custom_recipes.gemm pytorch.custom_recipes.quantization "
    "pytorch.custom_recipes.quantization_current_scaling "
    "pytorch.custom_recipes.quantization_nvfp4 pytorch.custom_recipes.utils "
    "pytorch.distributed pytorch.export pytorch.float8_tensor pytorch.fp8 pytorch.graph "
    "pytorch.jit pytorch.module pytorch.module.base pytorch.module.fp8_padding "
    "pytorch.module.fp8_unpadding pytorch.module.grouped_linear pytorch.module.layernorm "
    "pytorch.module.layernorm_linear pytorch.module.layernorm_mlp pytorch.module.linear "
    "pytorch.module.rmsnorm pytorch.numerics_debug pytorch.onnx_extensions pytorch.ops "
    "pytorch.ops.basic pytorch.ops.basic.activation pytorch.ops.basic.add_extra_input "
    "pytorch.ops.basic.all_gather pytorch.ops.basic.all_reduce pytorch.ops.basic.basic_linear "
    "pytorch.ops.basic.bias pytorch.ops.basic.constant_scale pytorch.ops.basic.dropout "
    "pytorch.ops.basic.identity pytorch.ops.basic.l2normalization "
    "pytorch.ops.basic.layer_norm pytorch.ops.basic.make_extra_output "
    "pytorch.ops.basic.quantize pytorch.ops.basic.reduce_scatter pytorch.ops.basic.reshape "
    "pytorch.ops.basic.rmsnorm pytorch.ops.fused pytorch.ops.fused.backward_activation_bias "
    "pytorch.ops.fused.backward_add_rmsnorm pytorch.ops.fused.backward_linear_add "
    "pytorch.ops.fused.backward_linear_scale pytorch.ops.fused.forward_linear_bias_activation "
    "pytorch.ops.fused.forward_linear_bias_add pytorch.ops.fused.forward_linear_scale_add "
    "pytorch.ops.fused.userbuffers_backward_linear "
    "pytorch.ops.fused.userbuffers_forward_linear pytorch.ops.fuser pytorch.ops.linear "
    "pytorch.ops.op pytorch.ops.sequential pytorch.optimizers pytorch.optimizers.fused_adam "
    "pytorch.optimizers.fused_sgd pytorch.optimizers.multi_tensor_apply pytorch.permutation "
    "pytorch.quantization pytorch.quantized_tensor pytorch.router pytorch.tensor "
    "pytorch.tensor.float8_blockwise_tensor pytorch.tensor.float8_tensor "
    "pytorch.tensor.mxfp8_tensor pytorch.tensor.nvfp4_tensor pytorch.tensor.storage "
    "pytorch.tensor.storage.float8_blockwise_tensor_storage "
    "pytorch.tensor.storage.float8_tensor_storage pytorch.tensor.storage.mxfp8_tensor_storage "
    "pytorch.tensor.storage.nvfp4_tensor_storage pytorch.tensor.utils pytorch.torch_version "
    "pytorch.transformer pytorch.utils"
)
"""Its modules below ``transformer_engine``, without kernels, bindings and debugging tools."""

NAMES: dict[str, str] = {
    "common.recipe": (
        "CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams "
        "MXFP8BlockScaling NVFP4BlockScaling QParams Recipe"
    ),
    "pytorch": (
        "CudaRNGStatesTracker DotProductAttention Float8BlockQuantizer Float8BlockwiseQTensor "
        "Float8BlockwiseQTensorStorage Float8CurrentScalingQuantizer Float8Quantizer "
        "Float8Tensor Float8TensorStorage Fp8Padding Fp8Unpadding GroupedLinear "
        "InferenceParams LayerNorm LayerNormLinear LayerNormMLP Linear MXFP8Quantizer "
        "MXFP8Tensor MXFP8TensorStorage MultiheadAttention NVFP4Quantizer NVFP4Tensor "
        "NVFP4TensorStorage QuantizedTensor QuantizedTensorStorage Quantizer RMSNorm "
        "RotaryPositionEmbedding TransformerLayer UserBufferQuantizationMode autocast "
        "checkpoint destroy_ub fp8_autocast fp8_model_init get_cpu_offload_context "
        "get_cudnn_version get_default_recipe get_device_compute_capability initialize_ub "
        "is_bf16_available is_fp8_available is_fp8_block_scaling_available is_mxfp8_available "
        "is_nvfp4_available make_graphed_callables moe_permute moe_permute_with_probs "
        "moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute "
        "onnx_export ops optimizers parallel_cross_entropy prepare_for_saving "
        "quantized_model_init restore_from_saved"
    ),
    "pytorch.attention": (
        "DotProductAttention InferenceParams MultiheadAttention RotaryPositionEmbedding"
    ),
    "pytorch.attention.dot_product_attention": "DotProductAttention _attention_backends",
    "pytorch.attention.multi_head_attention": "MultiheadAttention",
    "pytorch.attention.rope": (
        "FusedQKVRoPEFunc FusedRoPEFunc RotaryPositionEmbedding "
        "apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb"
    ),
    "pytorch.cpu_offload": (
        "DefaultOffloadSynchronizer ManualOffloadSynchronizer OffloadSynchronizer "
        "OffloadableLayerState TensorGroup TensorGroupProcessor get_cpu_offload_context "
        "is_cpu_offload_enabled mark_activation_offload mark_not_offload start_offload"
    ),
    "pytorch.cross_entropy": "CrossEntropyFunction parallel_cross_entropy",
    "pytorch.custom_recipes.quantization_current_scaling": (
        "CurrentScalingQuantizerRef CurrentScalingTensorRef current_scaling_ref_quantizer_factory"
    ),
    "pytorch.custom_recipes.quantization_nvfp4": (
        "NVFP4QuantizerRef NVFP4TensorRef cast_from_fp4x2 cast_to_e4m3 cast_to_e8 "
        "cast_to_fp4x2 get_wgrad_sign_vector high_precision_gemm_ref "
        "nvfp4_ref_rht_2d_quantizer_factory"
    ),
    "pytorch.distributed": (
        "CudaRNGStatesTracker FullyShardedDataParallel activation_recompute_forward allreduce "
        "checkpoint gather_along_first_dim gather_split_1d_tensor "
        "get_activation_recompute_contexts get_all_rng_states get_distributed_rank "
        "get_distributed_world_size get_symmetric_memory_tensor graph_safe_rng_available "
        "has_te_modules in_fp8_activation_recompute_phase initialize_affine_weight_gpu "
        "is_fp8_activation_recompute_enabled prepare_te_modules_for_fsdp "
        "reduce_scatter_along_first_dim set_all_rng_states "
        "set_tensor_model_parallel_attributes split_tensor_into_1d_equal_chunks "
        "symmetric_all_reduce use_reentrant_activation_recompute"
    ),
    "pytorch.float8_tensor": "Float8Tensor",
    "pytorch.fp8": (
        "CustomRecipe CustomRecipeState DelayedScaling DelayedScalingRecipeState "
        "FP8GlobalStateManager Float8BlockScaling Float8BlockScalingRecipeState "
        "Float8CurrentScaling Float8CurrentScalingRecipeState Format MXFP8BlockScaling "
        "MXFP8BlockScalingRecipeState NVFP4BlockScaling NVFP4BlockScalingRecipeState Recipe "
        "RecipeState check_fp8_block_scaling_support check_fp8_support check_mxfp8_support "
        "check_nvfp4_support check_recipe_support fp8_autocast fp8_model_init "
        "get_default_fp8_recipe get_fp4_te_dtype get_fp8_max get_fp8_te_dtype "
        "get_fp8_torch_dtype split_and_copy"
    ),
    "pytorch.graph": (
        "graph_pool_handle is_graph_capturing make_graphed_callables restore_fp8_tensors "
        "save_fp8_tensors set_capture_end set_capture_start"
    ),
    "pytorch.module": (
        "Fp8Padding Fp8Unpadding GroupedLinear LayerNorm LayerNormLinear LayerNormMLP Linear "
        "RMSNorm UserBufferQuantizationMode destroy_ub initialize_ub"
    ),
    "pytorch.module.base": (
        "TransformerEngineBaseModule UserBufferQuantizationMode destroy_ub "
        "fill_userbuffers_buffer_for_all_gather get_dummy_wgrad get_ub initialize_ub"
    ),
    "pytorch.ops": (
        "AddExtraInput AllGather AllReduce BasicLinear Bias ClampedSwiGLU ConstantScale "
        "Dropout FusibleOperation GEGLU GELU Identity L2Normalization LayerNorm Linear "
        "MakeExtraOutput QGEGLU QGELU Quantize RMSNorm ReGLU ReLU ReduceScatter Reshape "
        "SReGLU SReLU Sequential SiLU SwiGLU"
    ),
    "pytorch.ops.basic": (
        "AddExtraInput AllGather AllReduce BasicLinear Bias ClampedSwiGLU ConstantScale "
        "Dropout GEGLU GELU Identity L2Normalization LayerNorm MakeExtraOutput QGEGLU QGELU "
        "Quantize RMSNorm ReGLU ReLU ReduceScatter Reshape SReGLU SReLU SiLU SwiGLU"
    ),
    "pytorch.ops.fused": (
        "BackwardActivationBias BackwardAddRMSNorm BackwardLinearAdd BackwardLinearScale "
        "ForwardLinearBiasActivation ForwardLinearBiasAdd ForwardLinearScaleAdd "
        "UserbuffersBackwardLinear UserbuffersForwardLinear fuse_backward_activation_bias "
        "fuse_backward_add_rmsnorm fuse_backward_linear_add fuse_backward_linear_scale "
        "fuse_forward_linear_bias_activation fuse_forward_linear_bias_add "
        "fuse_forward_linear_scale_add fuse_userbuffers_backward_linear "
        "fuse_userbuffers_forward_linear"
    ),
    "pytorch.ops.fuser": "OperationFuser",
    "pytorch.ops.linear": "Linear",
    "pytorch.ops.op": "BasicOperation FusedOperation FusibleOperation OperationContext",
    "pytorch.ops.sequential": "Sequential",
    "pytorch.optimizers": (
        "FusedAdam FusedSGD MultiTensorApply multi_tensor_adam multi_tensor_adam_capturable "
        "multi_tensor_adam_capturable_master multi_tensor_adam_fp8 multi_tensor_applier "
        "multi_tensor_l2norm multi_tensor_scale multi_tensor_sgd multi_tensor_unscale_l2norm"
    ),
    "pytorch.permutation": (
        "moe_permute moe_permute_with_probs moe_sort_chunks_by_index "
        "moe_sort_chunks_by_index_with_probs moe_unpermute"
    ),
    "pytorch.quantization": (
        "CustomRecipeState DelayedScalingRecipeState FP8GlobalStateManager "
        "Float8BlockScalingRecipeState Float8CurrentScalingRecipeState "
        "MXFP8BlockScalingRecipeState NVFP4BlockScalingRecipeState RecipeState autocast "
        "check_fp8_block_scaling_support check_fp8_support check_mxfp8_support "
        "check_nvfp4_support check_recipe_support fp8_autocast fp8_model_init "
        "get_align_size_for_quantization get_default_fp8_recipe get_default_recipe "
        "get_fp4_te_dtype get_fp8_max get_fp8_te_dtype get_fp8_torch_dtype is_fp8_available "
        "is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available "
        "quantized_model_init split_and_copy"
    ),
    "pytorch.router": (
        "FusedAuxLoss FusedComputeScoresForMoEAuxLoss FusedTopkScoreFunction "
        "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss "
        "fused_topk_with_score_function"
    ),
    "pytorch.tensor": (
        "Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage "
        "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor Float8TensorStorage "
        "MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage NVFP4Quantizer NVFP4Tensor "
        "NVFP4TensorStorage QuantizedTensor QuantizedTensorStorage Quantizer "
        "cast_master_weights_to_fp8 get_all_tensor_types prepare_for_saving replace_raw_data "
        "restore_from_saved"
    ),
    "pytorch.tensor.float8_blockwise_tensor": "Float8BlockQuantizer Float8BlockwiseQTensor",
    "pytorch.tensor.float8_tensor": "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor",
    "pytorch.tensor.mxfp8_tensor": "MXFP8Quantizer MXFP8Tensor",
    "pytorch.tensor.nvfp4_tensor": (
        "NVFP4Quantizer NVFP4Tensor get_hadamard_matrix get_no_random_sign_vector "
        "get_random_sign_mask_for_rht get_rht_matrix get_sign_from_vector "
        "get_wgrad_sign_vector"
    ),
    "pytorch.tensor.utils": (
        "cast_master_weights_to_fp8 is_custom post_all_gather_processing replace_raw_data"
    ),
    "pytorch.transformer": "DropPath TransformerLayer",
}
"""The public names of those that have an import path here."""

SIGNATURES: dict[str, str] = {
    "common.recipe.CustomRecipe": "qfactory fp8_dpa fp8_mha",
    "common.recipe.DelayedScaling": (
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo "
        "reduce_amax fp8_dpa fp8_mha"
    ),
    "common.recipe.Float8BlockScaling": (
        "use_f32_scales fp8_format x_block_scaling_dim w_block_scaling_dim "
        "grad_block_scaling_dim fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha"
    ),
    "common.recipe.Float8CurrentScaling": (
        "use_power_2_scales fp8_format fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha"
    ),
    "common.recipe.MMParams": "use_split_accumulator",
    "common.recipe.MXFP8BlockScaling": "margin fp8_format fp8_dpa fp8_mha",
    "common.recipe.NVFP4BlockScaling": (
        "disable_rht disable_stochastic_rounding disable_2d_quantization fp4_format "
        "fp8_format fp8_dpa fp8_mha"
    ),
    "common.recipe.QParams": (
        "power_2_scale amax_epsilon random_hadamard_transform stochastic_rounding "
        "fp4_2d_quantization"
    ),
    "pytorch.CudaRNGStatesTracker": "",
    "pytorch.CudaRNGStatesTracker.reset": "",
    "pytorch.CudaRNGStatesTracker.get_states": "",
    "pytorch.CudaRNGStatesTracker.set_states": "states",
    "pytorch.CudaRNGStatesTracker.add": "name seed",
    "pytorch.CudaRNGStatesTracker.fork": "name",
    "pytorch.DotProductAttention": (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format "
        "attn_mask_type window_size sequence_parallel tp_size get_rng_state_tracker tp_group "
        "layer_number attention_type cp_group cp_global_ranks cp_stream cp_comm_type "
        "softmax_scale softmax_type return_max_logit"
    ),
    "pytorch.DotProductAttention.forward": (
        "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q "
        "cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv "
        "attn_mask_type window_size checkpoint_core_attention core_attention_bias_type "
        "core_attention_bias alibi_slopes fast_zero_fill inference_params pad_between_seqs "
        "fp8_output num_splits"
    ),
    "pytorch.Float8BlockQuantizer": (
        "fp8_dtype * rowwise columnwise amax_epsilon force_pow_2_scales block_scaling_dim "
        "all_gather_usage"
    ),
    "pytorch.Float8BlockwiseQTensor": (
        "*args rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv fp8_dtype "
        "quantizer is_2D_scaled data_format **kwargs"
    ),
    "pytorch.Float8BlockwiseQTensorStorage": (
        "rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv fp8_dtype "
        "quantizer is_2D_scaled data_format *args **kwargs"
    ),
    "pytorch.Float8CurrentScalingQuantizer": (
        "fp8_dtype device * rowwise columnwise use_existing_amax with_amax_reduction "
        "amax_reduction_group force_pow_2_scales amax_epsilon scale amax"
    ),
    "pytorch.Float8Quantizer": "scale amax fp8_dtype * rowwise columnwise",
    "pytorch.Float8Tensor": "*args data fp8_scale_inv fp8_dtype data_transpose quantizer **kwargs",
    "pytorch.Float8TensorStorage": (
        "*args data fp8_scale_inv fp8_dtype data_transpose quantizer **kwargs"
    ),
    "pytorch.Fp8Padding": "num_gemms align_size",
    "pytorch.Fp8Padding.forward": "inp m_splits",
    "pytorch.Fp8Unpadding": "num_gemms align_size",
    "pytorch.Fp8Unpadding.forward": "inp m_splits",
    "pytorch.GroupedLinear": (
        "num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation "
        "tp_group tp_size get_rng_state_tracker rng_tracker_name init_method bias return_bias "
        "params_dtype parallel_mode device ub_overlap_rs ub_overlap_ag ub_name "
        "delay_wgrad_compute save_original_input name"
    ),
    "pytorch.GroupedLinear.forward": "inp m_splits is_first_microbatch",
    "pytorch.InferenceParams": (
        "max_batch_size max_sequence_length num_heads_kv head_dim_k dtype head_dim_v is_paged "
        "total_num_pages page_size max_ctx_len qkv_format custom_cache_manager"
    ),
    "pytorch.LayerNorm": (
        "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size "
        "**kwargs"
    ),
    "pytorch.LayerNormLinear": (
        "in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group "
        "tp_size get_rng_state_tracker init_method bias normalization return_bias "
        "params_dtype parallel_mode return_layernorm_output return_layernorm_output_gathered "
        "parameters_split zero_centered_gamma device ub_overlap_ag ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute "
        "symmetric_ar_type name"
    ),
    "pytorch.LayerNormLinear.forward": "inp is_first_microbatch fp8_output fp8_grad",
    "pytorch.LayerNormMLP": (
        "hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker "
        "tp_group tp_size init_method bias normalization activation activation_params "
        "output_layer_init_method fuse_wgrad_accumulation params_dtype "
        "return_layernorm_output return_layernorm_output_gathered seq_length micro_batch_size "
        "set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute "
        "symmetric_ar_type checkpoint"
    ),
    "pytorch.LayerNormMLP.forward": "inp is_first_microbatch",
    "pytorch.Linear": (
        "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
        "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype "
        "parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute "
        "symmetric_ar_type save_original_input name"
    ),
    "pytorch.Linear.forward": "inp is_first_microbatch fp8_output fp8_grad",
    "pytorch.MXFP8Quantizer": "fp8_dtype * rowwise columnwise",
    "pytorch.MXFP8Tensor": (
        "*args rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv fp8_dtype "
        "quantizer **kwargs"
    ),
    "pytorch.MXFP8TensorStorage": (
        "rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv fp8_dtype "
        "quantizer *args **kwargs"
    ),
    "pytorch.MultiheadAttention": (
        "hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon "
        "init_method output_layer_init_method layer_number attn_mask_type window_size "
        "tp_group tp_size num_gqa_groups fuse_wgrad_accumulation get_rng_state_tracker "
        "sequence_parallel params_dtype return_bias return_layernorm_output input_layernorm "
        "attention_type set_parallel_mode fuse_qkv_params zero_centered_gamma "
        "qkv_weight_interleaved rotary_pos_interleaved ub_overlap_ag ub_overlap_rs "
        "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad bias normalization device qkv_format "
        "name qk_norm_type qk_norm_eps qk_norm_before_rope seq_length micro_batch_size "
        "softmax_type"
    ),
    "pytorch.MultiheadAttention.forward": (
        "hidden_states attention_mask encoder_output attn_mask_type window_size "
        "is_first_microbatch checkpoint_core_attention inference_params rotary_pos_emb "
        "core_attention_bias_type core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv fast_zero_fill "
        "pad_between_seqs"
    ),
    "pytorch.NVFP4Quantizer": (
        "fp4_dtype rowwise columnwise with_amax_reduction amax_reduction_group with_rht "
        "with_post_rht_amax with_2d_quantization stochastic_rounding with_random_sign_mask"
    ),
    "pytorch.NVFP4Tensor": (
        "*args rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv "
        "amax_rowwise amax_columnwise fp4_dtype quantizer **kwargs"
    ),
    "pytorch.NVFP4TensorStorage": (
        "rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv amax_rowwise "
        "amax_columnwise fp4_dtype quantizer *args **kwargs"
    ),
    "pytorch.QuantizedTensor": "shape dtype * requires_grad device",
    "pytorch.Quantizer": "* rowwise columnwise",
    "pytorch.RMSNorm": (
        "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size "
        "**kwargs"
    ),
    "pytorch.RotaryPositionEmbedding": (
        "dim rotary_percent seq_len_interpolation_factor pretrained_max_position_embeddings "
        "rotary_base interleaved"
    ),
    "pytorch.RotaryPositionEmbedding.forward": "max_seq_len offset",
    "pytorch.TransformerLayer": (
        "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon "
        "hidden_dropout attention_dropout init_method output_layer_init_method layer_number "
        "kv_channels self_attn_mask_type window_size enc_dec_attn_mask_type "
        "enc_dec_window_size tp_group tp_size params_dtype get_rng_state_tracker "
        "fuse_wgrad_accumulation seq_length micro_batch_size sequence_parallel "
        "apply_residual_connection_post_layernorm output_layernorm parallel_attention_mlp "
        "layer_type drop_path_rate set_parallel_mode fuse_qkv_params rotary_pos_interleaved "
        "zero_centered_gamma qkv_weight_interleaved ub_tp_comm_overlap ub_overlap_ag "
        "ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad bias activation "
        "activation_params normalization device attn_input_format name qk_norm_type "
        "qk_norm_eps qk_norm_before_rope softmax_type"
    ),
    "pytorch.TransformerLayer.forward": (
        "hidden_states attention_mask self_attn_mask_type window_size encoder_output "
        "enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size is_first_microbatch "
        "checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type "
        "core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded "
        "cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv fast_zero_fill pad_between_seqs"
    ),
    "pytorch.autocast": "enabled calibrating recipe amax_reduction_group _graph",
    "pytorch.checkpoint": "function *args **kwargs",
    "pytorch.destroy_ub": "",
    "pytorch.fp8_autocast": "enabled calibrating fp8_recipe fp8_group _graph",
    "pytorch.fp8_model_init": "enabled recipe preserve_high_precision_init_val",
    "pytorch.get_cpu_offload_context": (
        "enabled num_layers model_layers offload_activations offload_weights double_buffering "
        "manual_synchronization retain_pinned_cpu_buffers offload_stream"
    ),
    "pytorch.get_cudnn_version": "",
    "pytorch.get_default_recipe": "",
    "pytorch.get_device_compute_capability": "",
    "pytorch.initialize_ub": (
        "shape tp_size use_fp8 quantization_modes dtype ub_cfgs bootstrap_backend"
    ),
    "pytorch.is_bf16_available": "return_reason",
    "pytorch.is_fp8_available": "return_reason",
    "pytorch.is_fp8_block_scaling_available": "return_reason",
    "pytorch.is_mxfp8_available": "return_reason",
    "pytorch.is_nvfp4_available": "return_reason",
    "pytorch.make_graphed_callables": (
        "modules sample_args num_warmup_iters allow_unused_input sample_kwargs fp8_enabled "
        "fp8_calibrating fp8_recipe fp8_group fp8_weight_caching enabled calibrating recipe "
        "amax_reduction_group cache_quantized_params _order _num_layers_per_chunk pool "
        "retain_graph_in_backward _reuse_graph_input_output_buffers"
    ),
    "pytorch.moe_permute": "inp routing_map num_out_tokens max_token_num map_type",
    "pytorch.moe_permute_with_probs": "inp probs routing_map num_out_tokens",
    "pytorch.moe_sort_chunks_by_index": "inp split_sizes sorted_index",
    "pytorch.moe_sort_chunks_by_index_with_probs": "inp probs split_sizes sorted_index",
    "pytorch.moe_unpermute": "inp row_id_map merging_probs restore_shape map_type probs",
    "pytorch.onnx_export": "enabled",
    "pytorch.parallel_cross_entropy": (
        "inp target label_smoothing reduce_loss dist_process_group ignore_idx "
        "is_cg_capturable * _input"
    ),
    "pytorch.prepare_for_saving": "*tensors",
    "pytorch.quantized_model_init": "enabled recipe preserve_high_precision_init_val",
    "pytorch.restore_from_saved": "tensors saved_tensors return_saved_tensors",
    "pytorch.attention.rope.apply_fused_qkv_rotary_pos_emb": (
        "qkv q_freqs k_freqs qkv_split_arg_list tensor_format start_positions interleaved "
        "cu_seqlens cp_size cp_rank"
    ),
    "pytorch.attention.rope.apply_rotary_pos_emb": (
        "t freqs tensor_format start_positions interleaved fused cu_seqlens cp_size cp_rank"
    ),
    "pytorch.cpu_offload.DefaultOffloadSynchronizer": (
        "num_layers num_offloaded_layers retain_pinned_cpu_buffers offload_stream"
    ),
    "pytorch.cpu_offload.ManualOffloadSynchronizer": (
        "num_layers retain_pinned_cpu_buffers offload_stream"
    ),
    "pytorch.cpu_offload.OffloadSynchronizer": (
        "num_layers retain_pinned_cpu_buffers offload_stream"
    ),
    "pytorch.cpu_offload.OffloadableLayerState": "offload_stream retain_pinned_cpu_buffers",
    "pytorch.cpu_offload.TensorGroup": "tensor_list events aux",
    "pytorch.cpu_offload.is_cpu_offload_enabled": "",
    "pytorch.cpu_offload.mark_activation_offload": "*tensors",
    "pytorch.cpu_offload.mark_not_offload": "*tensors",
    "pytorch.cpu_offload.start_offload": "*tensors offload_base_tensor",
    "pytorch.custom_recipes.quantization_current_scaling.CurrentScalingQuantizerRef": (
        "dtype rowwise columnwise pow_2_scales eps"
    ),
    "pytorch.custom_recipes.quantization_current_scaling.CurrentScalingTensorRef": (
        "data scale data_t scale_t dtype device quant_dtype original_shape _quantizer"
    ),
    "pytorch.custom_recipes.quantization_current_scaling.current_scaling_ref_quantizer_factory": (
        "role"
    ),
    "pytorch.custom_recipes.quantization_nvfp4.NVFP4QuantizerRef": (
        "dtype rowwise columnwise pow_2_scales eps quant_tile_shape with_rht with_random_sign_mask"
    ),
    "pytorch.custom_recipes.quantization_nvfp4.NVFP4TensorRef": (
        "data scale data_t scale_t global_amax_row global_amax_col dtype device quant_dtype "
        "original_shape _quantizer"
    ),
    "pytorch.custom_recipes.quantization_nvfp4.cast_from_fp4x2": "x dq_dtype",
    "pytorch.custom_recipes.quantization_nvfp4.cast_to_e4m3": "decode_scale global_amax",
    "pytorch.custom_recipes.quantization_nvfp4.cast_to_e8": "decode_scale",
    "pytorch.custom_recipes.quantization_nvfp4.cast_to_fp4x2": "x",
    "pytorch.custom_recipes.quantization_nvfp4.get_wgrad_sign_vector": "",
    "pytorch.custom_recipes.quantization_nvfp4.high_precision_gemm_ref": (
        "a b out_dtype accumulate is_a_transposed is_b_transposed out bias scale_alpha"
    ),
    "pytorch.custom_recipes.quantization_nvfp4.nvfp4_ref_rht_2d_quantizer_factory": "role",
    "pytorch.distributed.FullyShardedDataParallel": "module *args **kwargs",
    "pytorch.distributed.activation_recompute_forward": "activation_recompute recompute_phase",
    "pytorch.distributed.allreduce": "inp tp_group async_op",
    "pytorch.distributed.gather_along_first_dim": "inp process_group async_op quantizer",
    "pytorch.distributed.gather_split_1d_tensor": "tensor tp_group",
    "pytorch.distributed.get_activation_recompute_contexts": "",
    "pytorch.distributed.get_all_rng_states": "",
    "pytorch.distributed.get_distributed_rank": "group",
    "pytorch.distributed.get_distributed_world_size": "group",
    "pytorch.distributed.get_symmetric_memory_tensor": (
        "tensor_numel tensor_dtype tensor_device tp_group tag"
    ),
    "pytorch.distributed.graph_safe_rng_available": "",
    "pytorch.distributed.has_te_modules": "network",
    "pytorch.distributed.in_fp8_activation_recompute_phase": "",
    "pytorch.distributed.initialize_affine_weight_gpu": (
        "weight init_method get_rng_state_tracker partition_dim stride set_tp_attributes"
    ),
    "pytorch.distributed.is_fp8_activation_recompute_enabled": "",
    "pytorch.distributed.prepare_te_modules_for_fsdp": "fsdp_root",
    "pytorch.distributed.reduce_scatter_along_first_dim": "inp tp_group async_op",
    "pytorch.distributed.set_all_rng_states": "states",
    "pytorch.distributed.set_tensor_model_parallel_attributes": "tensor is_parallel dim stride",
    "pytorch.distributed.split_tensor_into_1d_equal_chunks": "tensor tp_group new_buffer",
    "pytorch.distributed.symmetric_all_reduce": "inp tp_group async_op all_reduce_type",
    "pytorch.distributed.use_reentrant_activation_recompute": "",
    "pytorch.fp8.CustomRecipeState": "recipe * mode num_quantizers device",
    "pytorch.fp8.DelayedScalingRecipeState": "recipe * mode num_quantizers device",
    "pytorch.fp8.Float8BlockScalingRecipeState": "recipe * mode num_quantizers device",
    "pytorch.fp8.Float8CurrentScalingRecipeState": "recipe * mode num_quantizers device",
    "pytorch.fp8.MXFP8BlockScalingRecipeState": "recipe * mode num_quantizers device",
    "pytorch.fp8.NVFP4BlockScalingRecipeState": "recipe * mode num_quantizers device",
    "pytorch.fp8.check_fp8_block_scaling_support": "",
    "pytorch.fp8.check_fp8_support": "",
    "pytorch.fp8.check_mxfp8_support": "",
    "pytorch.fp8.check_nvfp4_support": "",
    "pytorch.fp8.check_recipe_support": "recipe",
    "pytorch.fp8.get_default_fp8_recipe": "",
    "pytorch.fp8.get_fp4_te_dtype": "fp4_recipe",
    "pytorch.fp8.get_fp8_max": "fp8_recipe fprop_tensor",
    "pytorch.fp8.get_fp8_te_dtype": "fp8_recipe fprop_tensor",
    "pytorch.fp8.get_fp8_torch_dtype": "fp8_recipe fprop_tensor",
    "pytorch.fp8.split_and_copy": "buffer outputs chunk_sizes",
    "pytorch.graph.graph_pool_handle": "",
    "pytorch.graph.is_graph_capturing": "",
    "pytorch.graph.restore_fp8_tensors": "modules fp8_tensors",
    "pytorch.graph.save_fp8_tensors": "modules recipe",
    "pytorch.graph.set_capture_end": "",
    "pytorch.graph.set_capture_start": "",
    "pytorch.module.base.TransformerEngineBaseModule": "",
    "pytorch.module.base.fill_userbuffers_buffer_for_all_gather": (
        "comm local_tensor quantizer process_group"
    ),
    "pytorch.module.base.get_dummy_wgrad": "shape dtype zero",
    "pytorch.module.base.get_ub": "name use_fp8",
    "pytorch.ops.AddExtraInput": "* in_place",
    "pytorch.ops.AllGather": "process_group",
    "pytorch.ops.AllReduce": "process_group reduce_in_backward",
    "pytorch.ops.BasicLinear": (
        "in_features out_features * device dtype tensor_parallel_mode tensor_parallel_group "
        "sequence_parallel rng_state_tracker_function accumulate_into_main_grad "
        "userbuffers_options"
    ),
    "pytorch.ops.Bias": "size * device dtype tensor_parallel tensor_parallel_group",
    "pytorch.ops.ClampedSwiGLU": "* limit alpha cache_quantized_input",
    "pytorch.ops.ConstantScale": "scale",
    "pytorch.ops.Dropout": "p",
    "pytorch.ops.GEGLU": "* cache_quantized_input",
    "pytorch.ops.GELU": "* cache_quantized_input",
    "pytorch.ops.Identity": "",
    "pytorch.ops.L2Normalization": "* eps seq_length micro_batch_size",
    "pytorch.ops.LayerNorm": "normalized_shape * eps device dtype zero_centered_gamma sm_margin",
    "pytorch.ops.Linear": (
        "in_features out_features * bias device dtype tensor_parallel_mode "
        "tensor_parallel_group sequence_parallel rng_state_tracker_function "
        "accumulate_into_main_grad"
    ),
    "pytorch.ops.MakeExtraOutput": "* in_place",
    "pytorch.ops.QGEGLU": "* cache_quantized_input",
    "pytorch.ops.QGELU": "* cache_quantized_input",
    "pytorch.ops.Quantize": "forward backward",
    "pytorch.ops.RMSNorm": "normalized_shape * eps device dtype zero_centered_gamma sm_margin",
    "pytorch.ops.ReGLU": "* cache_quantized_input",
    "pytorch.ops.ReLU": "* cache_quantized_input",
    "pytorch.ops.ReduceScatter": "process_group",
    "pytorch.ops.Reshape": "shape",
    "pytorch.ops.SReGLU": "* cache_quantized_input",
    "pytorch.ops.SReLU": "* cache_quantized_input",
    "pytorch.ops.Sequential": "*args",
    "pytorch.ops.SiLU": "* cache_quantized_input",
    "pytorch.ops.SwiGLU": "* cache_quantized_input",
    "pytorch.ops.fused.BackwardActivationBias": "* bias activation",
    "pytorch.ops.fused.BackwardAddRMSNorm": "* add rmsnorm",
    "pytorch.ops.fused.BackwardLinearAdd": "* backward_add linear",
    "pytorch.ops.fused.BackwardLinearScale": "* scale linear",
    "pytorch.ops.fused.ForwardLinearBiasActivation": "* linear bias activation",
    "pytorch.ops.fused.ForwardLinearBiasAdd": "* linear bias add",
    "pytorch.ops.fused.ForwardLinearScaleAdd": "* linear scale add",
    "pytorch.ops.fused.UserbuffersBackwardLinear": "* linear bias reduce_scatter",
    "pytorch.ops.fused.UserbuffersForwardLinear": "* linear bias reduce_scatter",
    "pytorch.ops.fused.fuse_backward_activation_bias": "ops recipe",
    "pytorch.ops.fused.fuse_backward_add_rmsnorm": "ops",
    "pytorch.ops.fused.fuse_backward_linear_add": "ops",
    "pytorch.ops.fused.fuse_backward_linear_scale": "ops",
    "pytorch.ops.fused.fuse_forward_linear_bias_activation": "ops",
    "pytorch.ops.fused.fuse_forward_linear_bias_add": "ops",
    "pytorch.ops.fused.fuse_forward_linear_scale_add": "ops",
    "pytorch.ops.fused.fuse_userbuffers_backward_linear": "ops",
    "pytorch.ops.fused.fuse_userbuffers_forward_linear": "ops",
    "pytorch.ops.fuser.OperationFuser": "ops",
    "pytorch.ops.op.BasicOperation": "",
    "pytorch.ops.op.FusedOperation": "basic_ops",
    "pytorch.ops.op.OperationContext": "saved_tensors to_save _saved_tensors_range requires_grad",
    "pytorch.optimizers.FusedAdam": (
        "params lr betas eps weight_decay amsgrad * bias_correction adam_w_mode capturable "
        "master_weights master_weight_dtype exp_avg_dtype exp_avg_sq_dtype use_decoupled_grad "
        "store_param_remainders set_grad_none"
    ),
    "pytorch.optimizers.FusedAdam.step": "closure grad_scaler",
    "pytorch.optimizers.FusedAdam.zero_grad": "set_to_none",
    "pytorch.optimizers.FusedAdam.initialize_state": "param store_param_remainders",
    "pytorch.optimizers.FusedSGD": (
        "params lr momentum dampening weight_decay nesterov * wd_after_momentum "
        "materialize_master_grads set_grad_none"
    ),
    "pytorch.optimizers.FusedSGD.step": "closure",
    "pytorch.optimizers.FusedSGD.zero_grad": "set_to_none",
    "pytorch.optimizers.MultiTensorApply": "chunk_size",
    "pytorch.quantization.get_align_size_for_quantization": "recipe",
    "pytorch.router.fused_compute_score_for_moe_aux_loss": "logits topk score_function",
    "pytorch.router.fused_moe_aux_loss": (
        "probs tokens_per_expert total_num_tokens num_experts topk coeff"
    ),
    "pytorch.router.fused_topk_with_score_function": (
        "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function "
        "expert_bias"
    ),
    "pytorch.tensor.cast_master_weights_to_fp8": (
        "model_weights master_weights start_offsets group fsdp_shard_model_weights "
        "manual_post_all_gather_processing"
    ),
    "pytorch.tensor.get_all_tensor_types": "",
    "pytorch.tensor.replace_raw_data": "tensor new_raw_data",
    "pytorch.tensor.nvfp4_tensor.get_hadamard_matrix": "hadamard_dimension device",
    "pytorch.tensor.nvfp4_tensor.get_no_random_sign_vector": "device",
    "pytorch.tensor.nvfp4_tensor.get_random_sign_mask_for_rht": "with_random_sign_mask device",
    "pytorch.tensor.nvfp4_tensor.get_rht_matrix": "with_random_sign_mask device",
    "pytorch.tensor.nvfp4_tensor.get_sign_from_vector": "vector",
    "pytorch.tensor.nvfp4_tensor.get_wgrad_sign_vector": "device",
    "pytorch.tensor.utils.is_custom": "x",
    "pytorch.tensor.utils.post_all_gather_processing": "model_weights",
    "pytorch.transformer.DropPath": "drop_prob",
    "pytorch.DotProductAttention.set_context_parallel_group": (
        "cp_group cp_global_ranks cp_stream cp_comm_type"
    ),
    "pytorch.DotProductAttention.init_fp8_metadata": "num_gemms",
    "pytorch.DotProductAttention.set_meta_tensor": "fwd recipe",
    "pytorch.Float8BlockQuantizer.copy": "",
    "pytorch.Float8BlockQuantizer.update_quantized": "src dst * noop_flag",
    "pytorch.Float8BlockQuantizer.quantize_impl": "tensor",
    "pytorch.Float8BlockQuantizer.get_scale_shape": "shape columnwise",
    "pytorch.Float8BlockQuantizer.get_columnwise_shape": "shape",
    "pytorch.Float8BlockQuantizer.is_quantizable": "inp",
    "pytorch.Float8BlockQuantizer.make_empty": "shape * dtype device requires_grad pin_memory",
    "pytorch.Float8BlockQuantizer.calibrate": "tensor",
    "pytorch.Float8BlockwiseQTensor.quantize_": "tensor * noop_flag",
    "pytorch.Float8BlockwiseQTensorStorage.clear": "",
    "pytorch.Float8BlockwiseQTensorStorage.get_metadata": "",
    "pytorch.Float8BlockwiseQTensorStorage.prepare_for_saving": "",
    "pytorch.Float8BlockwiseQTensorStorage.restore_from_saved": "tensors",
    "pytorch.Float8BlockwiseQTensorStorage.get_data_tensors": "rowwise_data columnwise_data",
    "pytorch.Float8BlockwiseQTensorStorage.update_usage": "rowwise_usage columnwise_usage",
    "pytorch.Float8BlockwiseQTensorStorage.get_usages": "",
    "pytorch.Float8CurrentScalingQuantizer.copy": "",
    "pytorch.Float8CurrentScalingQuantizer.update_quantized": "src dst * noop_flag",
    "pytorch.Float8CurrentScalingQuantizer.quantize_impl": "tensor",
    "pytorch.Float8CurrentScalingQuantizer.make_empty": (
        "shape * dtype device requires_grad pin_memory"
    ),
    "pytorch.Float8CurrentScalingQuantizer.calibrate": "tensor",
    "pytorch.Float8CurrentScalingQuantizer.create_tensor_from_data": (
        "data fake_dtype requires_grad internal"
    ),
    "pytorch.Float8CurrentScalingQuantizer.supports_only_rowwise_all_gather": "",
    "pytorch.Float8Quantizer.copy": "",
    "pytorch.Float8Quantizer.update_quantized": "src dst * noop_flag",
    "pytorch.Float8Quantizer.quantize_impl": "tensor",
    "pytorch.Float8Quantizer.make_empty": "shape * dtype device requires_grad pin_memory",
    "pytorch.Float8Quantizer.calibrate": "tensor",
    "pytorch.Float8Quantizer.create_tensor_from_data": "data fake_dtype requires_grad internal",
    "pytorch.Float8Quantizer.supports_only_rowwise_all_gather": "",
    "pytorch.Float8Tensor.quantize_": "tensor * noop_flag",
    "pytorch.Float8Tensor.remove_caches": "",
    "pytorch.Float8Tensor.make_like": "tensor * shape dtype requires_grad data data_transpose",
    "pytorch.Float8TensorStorage.clear": "",
    "pytorch.Float8TensorStorage.get_metadata": "",
    "pytorch.Float8TensorStorage.prepare_for_saving": "",
    "pytorch.Float8TensorStorage.restore_from_saved": "tensors",
    "pytorch.Float8TensorStorage.get_data_tensors": "rowwise_data columnwise_data",
    "pytorch.Float8TensorStorage.update_usage": "rowwise_usage columnwise_usage",
    "pytorch.Float8TensorStorage.get_usages": "",
    "pytorch.GroupedLinear.backward_dw": "",
    "pytorch.LayerNormLinear.reset_layer_norm_parameters": "",
    "pytorch.LayerNormMLP.reset_layer_norm_parameters": "",
    "pytorch.LayerNormMLP.backward_dw": "",
    "pytorch.MXFP8Quantizer.copy": "",
    "pytorch.MXFP8Quantizer.update_quantized": "src dst * noop_flag",
    "pytorch.MXFP8Quantizer.quantize_impl": "tensor",
    "pytorch.MXFP8Quantizer.is_quantizable": "inp",
    "pytorch.MXFP8Quantizer.make_empty": "shape * dtype device requires_grad pin_memory",
    "pytorch.MXFP8Quantizer.calibrate": "tensor",
    "pytorch.MXFP8Quantizer.create_tensor_from_data": "data scale_inv fake_dtype fp8_dtype",
    "pytorch.MXFP8Tensor.quantize_": "tensor * noop_flag",
    "pytorch.MXFP8TensorStorage.clear": "",
    "pytorch.MXFP8TensorStorage.get_metadata": "",
    "pytorch.MXFP8TensorStorage.prepare_for_saving": "",
    "pytorch.MXFP8TensorStorage.restore_from_saved": "tensors",
    "pytorch.MXFP8TensorStorage.get_data_tensors": "rowwise_data columnwise_data",
    "pytorch.MXFP8TensorStorage.update_usage": "rowwise_usage columnwise_usage",
    "pytorch.MXFP8TensorStorage.get_usages": "",
    "pytorch.MultiheadAttention.set_tensor_parallel_group": "tp_group",
    "pytorch.MultiheadAttention.set_context_parallel_group": (
        "cp_group cp_global_ranks cp_stream cp_comm_type"
    ),
    "pytorch.NVFP4Quantizer.update_quantized": "src dst * noop_flag",
    "pytorch.NVFP4Quantizer.copy": "",
    "pytorch.NVFP4Quantizer.quantize_impl": "tensor",
    "pytorch.NVFP4Quantizer.is_quantizable": "inp",
    "pytorch.NVFP4Quantizer.get_scale_shape": "shape columnwise",
    "pytorch.NVFP4Quantizer.get_columnwise_shape": "shape",
    "pytorch.NVFP4Quantizer.convert_shape_for_fp4": "shape",
    "pytorch.NVFP4Quantizer.make_empty": "shape * dtype device pin_memory requires_grad",
    "pytorch.NVFP4Quantizer.calibrate": "tensor",
    "pytorch.NVFP4Tensor.quantize_": "tensor * noop_flag",
    "pytorch.NVFP4Tensor.get_usages": "",
    "pytorch.NVFP4TensorStorage.clear": "",
    "pytorch.NVFP4TensorStorage.get_metadata": "",
    "pytorch.NVFP4TensorStorage.prepare_for_saving": "",
    "pytorch.NVFP4TensorStorage.restore_from_saved": "tensors",
    "pytorch.NVFP4TensorStorage.get_data_tensors": "",
    "pytorch.NVFP4TensorStorage.update_usage": "rowwise_usage columnwise_usage",
    "pytorch.QuantizedTensor.quantize_": "tensor",
    "pytorch.QuantizedTensor.clear": "",
    "pytorch.QuantizedTensor.get_metadata": "",
    "pytorch.QuantizedTensor.make_like": "tensor * shape dtype requires_grad",
    "pytorch.QuantizedTensor.to_dtype": "dtype",
    "pytorch.TransformerLayer.set_tensor_parallel_group": "tp_group",
    "pytorch.TransformerLayer.reset_fp8_meta_tensors": "",
    "pytorch.TransformerLayer.set_context_parallel_group": (
        "cp_group cp_global_ranks cp_stream cp_comm_type"
    ),
    "pytorch.module.base.TransformerEngineBaseModule.adjust_amax_history_length": "length fwd",
    "pytorch.module.base.TransformerEngineBaseModule.set_meta_tensor": "fwd recipe",
    "pytorch.module.base.TransformerEngineBaseModule.init_fp8_meta_tensors": "recipe",
    "pytorch.module.base.TransformerEngineBaseModule.get_fp8_meta_tensors": "",
    "pytorch.module.base.TransformerEngineBaseModule.reset_fp8_meta_tensors": "fp8_meta_tensors",
    "pytorch.module.base.TransformerEngineBaseModule.get_extra_state": "",
    "pytorch.module.base.TransformerEngineBaseModule.set_extra_state": "state",
    "pytorch.module.base.TransformerEngineBaseModule.set_activation_dtype": "inp",
    "pytorch.module.base.TransformerEngineBaseModule.set_tensor_parallel_group": "tp_group",
    "pytorch.module.base.TransformerEngineBaseModule.init_fp8_metadata": "num_gemms",
    "pytorch.module.base.TransformerEngineBaseModule.prepare_forward": (
        "inp num_gemms allow_non_contiguous allow_different_data_and_param_types"
    ),
    "pytorch.module.base.TransformerEngineBaseModule.set_nccl_overlap_warning_if_tp": "",
    "pytorch.module.base.TransformerEngineBaseModule.grad_output_preprocess": (
        "ctx grad_output row_parallel_mode quantizer"
    ),
    "pytorch.module.base.TransformerEngineBaseModule.reset_parameters": "defer_init",
    "pytorch.module.base.TransformerEngineBaseModule.get_weight_workspace": (
        "* tensor quantizer cache_name update_workspace skip_update_flag fsdp_group workspace_dtype"
    ),
    "pytorch.GroupedLinear.register_wgrad_accumulation_and_reduce_hooks": (
        "wgrad_accumulation_and_reduce_hook"
    ),
    "pytorch.module.base.TransformerEngineBaseModule.need_backward_dw": "",
    "pytorch.module.base.TransformerEngineBaseModule.backward_dw": "",
    "pytorch.module.base.TransformerEngineBaseModule.is_debug_iter": "",
    "pytorch.module.base.TransformerEngineBaseModule.no_debug_features_active": "quantizers",
    "pytorch.ops.Sequential.append": "module",
    "pytorch.ops.Sequential.extend": "modules",
    "pytorch.ops.Sequential.insert": "idx module",
    "pytorch.ops.Sequential.pop": "idx",
    "pytorch.ops.Sequential.forward": "input *extra_inputs",
    "pytorch.ops.fuser.OperationFuser.maybe_fuse_ops": "is_grad_enabled recipe input_ extra_inputs",
    "pytorch.ops.op.BasicOperation.num_quantizers": "mode",
    "pytorch.ops.op.BasicOperation.get_input_quantizer": "",
    "pytorch.ops.op.BasicOperation.get_grad_output_quantizer": "",
    "pytorch.ops.op.BasicOperation.reset_recipe_state": "* recipe",
    "pytorch.ops.op.BasicOperation.get_quantizer": "mode index",
    "pytorch.ops.op.BasicOperation.forward": "input *extra_inputs **kwargs",
    "pytorch.ops.op.BasicOperation.get_extra_state": "",
    "pytorch.ops.op.BasicOperation.set_extra_state": "state",
    "pytorch.ops.op.FusedOperation.get_input_quantizer": "",
    "pytorch.ops.op.FusedOperation.get_grad_output_quantizer": "",
    "pytorch.ops.op.FusedOperation.pre_first_fuser_forward": "",
    "pytorch.ops.op.FusedOperation.pre_fuser_forward": "* requires_grad",
    "pytorch.ops.op.FusedOperation.forward": "input *extra_inputs basic_op_kwargs",
    "pytorch.ops.op.OperationContext.save_for_backward": "*tensors",
    "pytorch.optimizers.FusedAdam.get_unscaled_state": "param state_name",
    "pytorch.optimizers.FusedAdam.set_scaled_state": "param state_name unscaled_state",
    "pytorch.optimizers.FusedSGD.get_momentums": "params",
}
"""The arguments of functions, constructors and methods, of each by its first path; methods that are
torch's, and those of ops, are left out."""
