# What cannot run here is left out, and said so. KMQ_TEST_SCALE stretches the time limits, KMQ_KAFKA=host:port names a real
# cluster, KMQ_LONG=1 includes the long runs, ERL_LIBS may bring Broadway.
import Kmq.Test.Eventually, only: [scaled: 1]

seed = Keyword.get(ExUnit.configuration(), :seed) || rem(System.os_time(:microsecond), 1_000_000)

{rdkafka, rdkafka_number} = :kmq_nif.version()

needs = [
  integration: Kmq.Test.Kafka.available(),
  secured: Kmq.Test.SecuredKafka.available(),
  broadway:
    if(Code.ensure_loaded?(Broadway),
      do: :ok,
      else: {:missing, "Broadway is not loaded; ERL_LIBS=... brings it"}
    ),
  cooperative:
    if(rdkafka_number >= 0x020A01FF,
      do: :ok,
      else:
        {:missing,
         "librdkafka is #{rdkafka}, and this needs 2.10.1; `make test-long RDKAFKA=path` brings another"}
    ),
  http:
    if(match?({_, 0}, System.cmd("sh", ["-c", "pkg-config --exists libmicrohttpd"])),
      do: :ok,
      else: {:missing, "no libmicrohttpd; apt-get install libmicrohttpd-dev brings it"}
    ),
  slow:
    if(System.get_env("KMQ_LONG") == "1",
      do: :ok,
      else: {:missing, "long runs; `make test-long` has them"}
    ),
  sanitizer:
    if(System.get_env("KMQ_SANITIZER") == "1",
      do: :ok,
      else: {:missing, "the NIF under ASan; `make test-asan` has it"}
    )
]

ExUnit.start(
  seed: seed,
  exclude: for({tag, {:missing, _}} <- needs, do: tag),
  timeout: scaled(120_000),
  capture_log: true,
  assert_receive_timeout: scaled(2_000)
)

# What setup_all has started speaks when no test captures it: only what is worth a look is shown.
if Version.match?(System.version(), ">= 1.15.0"),
  do: :logger.set_handler_config(:default, :level, :warning),
  else: apply(Logger, :configure_backend, [:console, [level: :warning]])

included = Keyword.get(ExUnit.configuration(), :include, [])

IO.puts("seed #{seed}, librdkafka #{rdkafka}")

for {tag, {:missing, why}} <- needs,
    tag not in included,
    !Keyword.keyword?(included) or not Keyword.has_key?(included, tag) do
  IO.puts("left out: #{tag} (#{why})")
end

ExUnit.after_suite(fn _ -> Kmq.Test.Kafka.stop_shared() end)
