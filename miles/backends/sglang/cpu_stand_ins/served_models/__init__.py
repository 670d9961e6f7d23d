"""SGLang's own implementations of the models that miles trains, and no others.

SGLang imports all of its model files, some 250, in each of its processes, unless a package of models is named to it
(SGLANG_EXTERNAL_MODEL_PACKAGE). Then it reads that package first and the rest only for a model that is not in it.
"""
