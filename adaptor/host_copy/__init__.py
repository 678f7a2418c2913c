"""Host-memory copies (TTP_HOST_COPY): every few steps each rank copies its state to memory of its agent, and
the next start of the workers makes a checkpoint of the copies if no later step was saved.
"""
