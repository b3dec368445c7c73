ERTS_INCLUDE := /usr/lib/erlang/erts-13.1.5/include
EI_INCLUDE := /usr/lib/erlang/lib/erl_interface-5.3/include
EI_LIB := /usr/lib/erlang/lib/erl_interface-5.3/lib
