defmodule Kmq.Reject do
  @moduledoc """
  Raised in a handler, it sends the message to the dead letter topic at once, without another attempt.

      def handle_message(_processor, message, _context) do
        case Jason.decode(message.data) do
          {:ok, order} -> Broadway.Message.put_data(message, order)
          {:error, _} -> raise Kmq.Reject, "not JSON"
        end
      end

  The text is found in the dead letter's `kmq-error` header. The same without an exception:
  `Broadway.Message.failed(message, {:reject, "not JSON"})`.
  """
  defexception message: "rejected"

  @type t :: %__MODULE__{message: String.t()}
end
